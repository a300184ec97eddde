// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/diversity/pool_rows.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {
namespace {

struct PoolScratch {
  float sum[kChunkColumns], values[kChunkColumns];
};

}  // namespace

void pool_rows(const Execution& execution, AnyMatrix in, Array<const PooledRows> ranges, Matrix<float> out) {
  const std::int64_t columns = in.columns, chunks = (columns + kChunkColumns - 1) / kChunkColumns;
  for_teams(
      execution, "pool rows", ranges.size * chunks, sizeof(PoolScratch), KOKKOS_LAMBDA(const Team& team) {
        PoolScratch& buffer = scratch<PoolScratch>(team);
        const PooledRows range = ranges[team.league_rank() / chunks];
        const std::int64_t column = team.league_rank() % chunks * kChunkColumns;
        const int count = smaller(kChunkColumns, columns - column);
        for_columns(team, count, [&](int c) { buffer.sum[c] = 0; });
        for (std::int64_t row = range.begin; row < range.end; ++row) {
          const float* const x = row_chunk(team, in, row, column, count, buffer.values);
          for_columns(team, count, [&](int c) { buffer.sum[c] += x[c]; });
        }
        float* const to = out.row(range.to) + column;
        for_columns(team, count, [&](int c) { to[c] += range.scale * buffer.sum[c]; });
      });
}

}  // namespace weft::kernels
