// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/residual/residual.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels::portable {
namespace {

struct ResidualScratch {
  float a[kChunkColumns], b[kChunkColumns];
};

}  // namespace

void add_bias(const Execution& execution, AnyMatrix rows, Array<const float> bias) {
  for_teams(
      execution, "add_bias", rows.rows, sizeof(ResidualScratch), KOKKOS_LAMBDA(const Team& team) {
        ResidualScratch& buffer = scratch<ResidualScratch>(team);
        const std::int64_t n = team.league_rank();
        for_chunks(rows.columns, rows.columns, [&](std::int64_t column, int count) {
          const float *x = row_chunk(team, rows, n, column, count, buffer.a), *b = bias.data + column;
          store_chunk(team, rows, n, column, count, [&](int c) { return x[c] + b[c]; });
        });
      });
}

void add_rows(const Execution& execution, AnyMatrix x, AnyMatrix addend, AnyMatrix sum) {
  for_teams(
      execution, "add_rows", sum.rows, sizeof(ResidualScratch), KOKKOS_LAMBDA(const Team& team) {
        ResidualScratch& buffer = scratch<ResidualScratch>(team);
        const std::int64_t n = team.league_rank();
        for_chunks(sum.columns, sum.columns, [&](std::int64_t column, int count) {
          const float *a = row_chunk(team, x, n, column, count, buffer.a),
                      *b = row_chunk(team, addend, n, column, count, buffer.b);
          store_chunk(team, sum, n, column, count, [&](int c) { return a[c] + b[c]; });
        });
      });
}

void scale_rows(const Execution& execution, AnyMatrix rows, float factor) {
  for_teams(
      execution, "scale_rows", rows.rows, sizeof(ResidualScratch), KOKKOS_LAMBDA(const Team& team) {
        ResidualScratch& buffer = scratch<ResidualScratch>(team);
        const std::int64_t n = team.league_rank();
        for_chunks(rows.columns, rows.columns, [&](std::int64_t column, int count) {
          const float* x = row_chunk(team, rows, n, column, count, buffer.a);
          store_chunk(team, rows, n, column, count, [&](int c) { return x[c] * factor; });
        });
      });
}

}  // namespace weft::kernels::portable
