// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/linear/linear.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels {
namespace {

struct MomentsScratch {
  float group[kMomentColumns];
};
struct TermsScratch {
  float weight[kChunkColumns];
};

}  // namespace

void form_moments(const Execution& execution, AnyMatrix rows, Array<Moments> moments, const ScaledRows& scaled) {
  const float* const weight = scaled.rows.data == nullptr ? nullptr : scaled.weight.data;
  const AnyMatrix to = scaled.rows;
  for_rows<MomentsScratch>(
      execution, "form_moments", rows.rows, KOKKOS_LAMBDA(const Team& team, MomentsScratch& buffer, std::int64_t row) {
        const std::int64_t groups = moment_groups(rows.columns);
        for (std::int64_t group = 0; group < groups; ++group) {
          const std::int64_t first = group * kMomentColumns;
          const int count = smaller(kMomentColumns, rows.columns - first);
          const float* x = row_chunk(team, rows, row, first, count, buffer.group);
          const float mean = sum_columns<float>(team, count, [&](int c) { return x[c]; }) / static_cast<float>(count);
          const float squares = sum_columns<float>(team, count, [&](int c) { return (x[c] - mean) * (x[c] - mean); });
          once(team, [&] { moments[row * groups + group] = {mean, squares}; });
          if (weight != nullptr)
            store_chunk(team, to, row, first, count, [&](int c) { return x[c] * weight[first + c]; });
        }
      });
}

void form_norm_terms(const Execution& execution, const LinearWeights& weights, const NormWeights& norm,
                     Array<float> sums, Array<float> bias) {
  const AnyMatrix matrix = weights.matrix;
  const float* const factor = norm.weight.data;
  const float* const shift = norm.bias.size > 0 ? norm.bias.data : nullptr;
  const float* const added = weights.bias.size > 0 ? weights.bias.data : nullptr;
  for_rows<TermsScratch>(
      execution, "form_norm_terms", sums.size, KOKKOS_LAMBDA(const Team& team, TermsScratch& buffer, std::int64_t row) {
        float sum = 0.0f, constant = added == nullptr ? 0.0f : added[row];
        for_chunks(matrix.columns, matrix.columns, [&](std::int64_t column, int count) {
          const float* const w = row_chunk(team, matrix, row, column, count, buffer.weight);
          sum += sum_columns<float>(team, count, [&](int c) { return w[c] * factor[column + c]; });
          if (shift != nullptr)
            constant += sum_columns<float>(team, count, [&](int c) { return w[c] * shift[column + c]; });
        });
        once(team, [&] {
          sums[row] = sum;
          bias[row] = constant;
        });
      });
}

}  // namespace weft::kernels
