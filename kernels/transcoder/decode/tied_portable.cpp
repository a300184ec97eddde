// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/transcoder/decode/tied.hpp"

namespace weft::kernels {
namespace {

struct TiedScratch {
  float sum[kChunkColumns];
  float value[kChunkColumns];
};

// Sums over layers in the order first, first + stride, ...: one team per row and chunk of a layer's columns.
void running_sum(const Execution& execution, const char* name, const AnyMatrix of_rows, std::int64_t d_model,
                 std::int64_t first, std::int64_t stride) {
  const AnyMatrix rows = of_rows;
  const std::int64_t n_layers = rows.columns / d_model, n_chunks = (d_model + kChunkColumns - 1) / kChunkColumns;
  for_teams(
      execution, name, rows.rows * n_chunks, sizeof(TiedScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank() / n_chunks;
        const std::int64_t column = team.league_rank() % n_chunks * kChunkColumns;
        const int count = smaller(kChunkColumns, d_model - column);
        TiedScratch& buffer = scratch<TiedScratch>(team);
        float* const sum = buffer.sum;
        for_columns(team, count, [&](int c) { sum[c] = 0.0f; });
        for (std::int64_t i = 0; i < n_layers; ++i) {
          const std::int64_t at = (first + i * stride) * d_model + column;
          const float* value = row_chunk(team, rows, row, at, count, buffer.value);
          for_columns(team, count, [&](int c) { sum[c] += value[c]; });
          store_chunk(team, rows, row, at, count, [&](int c) { return sum[c]; });
        }
      });
}

}  // namespace

void sum_to_later_layers(const Execution& execution, AnyMatrix rows, std::int64_t d_model) {
  running_sum(execution, "sum_to_later_layers", rows, d_model, 0, 1);
}

void sum_from_later_layers(const Execution& execution, AnyMatrix rows, std::int64_t d_model) {
  running_sum(execution, "sum_from_later_layers", rows, d_model, rows.columns / d_model - 1, -1);
}

}  // namespace weft::kernels
