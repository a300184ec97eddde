// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/linear/row_moments.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels {
namespace {

struct MomentsScratch {
  float group[kMomentColumns];
};

}  // namespace

void row_moments(const Execution& execution, AnyMatrix rows, Array<Moments> moments) {
  for_rows<MomentsScratch>(
      execution, "row_moments", rows.rows, KOKKOS_LAMBDA(const Team& team, MomentsScratch& buffer, std::int64_t row) {
        const std::int64_t groups = moment_groups(rows.columns);
        for (std::int64_t group = 0; group < groups; ++group) {
          const std::int64_t first = group * kMomentColumns;
          const int count = smaller(kMomentColumns, rows.columns - first);
          const float* x = row_chunk(team, rows, row, first, count, buffer.group);
          const float mean = sum_columns<float>(team, count, [&](int c) { return x[c]; }) / static_cast<float>(count);
          const float squares = sum_columns<float>(team, count, [&](int c) { return (x[c] - mean) * (x[c] - mean); });
          once(team, [&] { moments[row * groups + group] = {mean, squares}; });
        }
      });
}

}  // namespace weft::kernels
