// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "kernels/portable.hpp"
#include "kernels/transcoder/loss/auxiliary_loss.hpp"

namespace weft::kernels {
namespace {

struct RowsScratch {
  float sum[kChunkColumns];
  float part[kChunkColumns];
  float gradient[kChunkColumns];
};

}  // namespace

void mask_alive(const Execution& execution, Matrix<const float> bias, Array<const std::int64_t> clocks,
                std::int64_t window, Matrix<float> masked) {
  const std::int64_t columns = bias.columns;
  for_all(
      execution, "mask_alive", bias.rows * columns, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = i / columns, column = i % columns;
        masked(row, column) = clocks[i] >= window ? bias(row, column) : -INFINITY;
      });
}

void auxiliary_rows(const Execution& execution, AnyMatrix partial, std::int64_t n_parts, AnyMatrix gradient_rows,
                    float factor, float coefficient, AnyMatrix rows, Array<double> squares) {
  for_teams(
      execution, "auxiliary_rows", rows.rows, sizeof(RowsScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        RowsScratch& buffer = scratch<RowsScratch>(team);
        float* const sum = buffer.sum;
        double total = 0.0;
        for_chunks(rows.columns, rows.columns, [&](std::int64_t column, int count) {
          for (std::int64_t part = 0; part < n_parts; ++part) {
            const float* p = row_chunk(team, partial, part * rows.rows + row, column, count, buffer.part);
            if (part == 0)
              for_columns(team, count, [&](int c) { sum[c] = p[c]; });
            else
              for_columns(team, count, [&](int c) { sum[c] += p[c]; });
          }
          const float* g = row_chunk(team, gradient_rows, row, column, count, buffer.gradient);
          for_columns(team, count, [&](int c) { sum[c] = coefficient * (factor * sum[c] + g[c]); });
          store_chunk(team, rows, row, column, count, [&](int c) { return sum[c]; });
          total += sum_columns<double>(team, count, [&](int c) { return static_cast<double>(sum[c]) * sum[c]; });
        });
        once(team, [&] { squares[row] += total; });
      });
}

}  // namespace weft::kernels
