// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "kernels/portable.hpp"
#include "kernels/random.hpp"
#include "kernels/transcoder/encode/resample.hpp"

namespace weft::kernels {
namespace {

struct ResampleScratch {
  float value[kChunkColumns];
};

/// Sum of the squares of a row of `m`, the same on every lane.
KOKKOS_FORCEINLINE_FUNCTION double row_square(const Team& team, const AnyMatrix& m, std::int64_t row,
                                              ResampleScratch& buffer) {
  double total = 0.0;
  for_chunks(m.columns, m.columns, [&](std::int64_t column, int count) {
    const float* value = row_chunk(team, m, row, column, count, buffer.value);
    total += sum_columns<double>(team, count, [&](int c) { return static_cast<double>(value[c]) * value[c]; });
  });
  return total;
}

KOKKOS_FORCEINLINE_FUNCTION bool finite(double value) { return value - value == 0.0; }

}  // namespace

void sums_of_squares(const Execution& execution, AnyMatrix rows, Array<double> sums) {
  for_teams(
      execution, "row_squares", rows.rows, sizeof(ResampleScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        const double total = row_square(team, rows, row, scratch<ResampleScratch>(team));
        once(team, [&] { sums[row] = finite(total) ? total : 0.0; });
      });
  const std::int64_t n = rows.rows;
  for_all(
      execution, "sums_of_squares", 1, KOKKOS_LAMBDA(std::int64_t) {
        for (std::int64_t i = 1; i < n; ++i) sums[i] += sums[i - 1];
      });
}

void draw_tokens(const Execution& execution, Array<const std::int64_t> clocks, std::int64_t window,
                 Array<const double> sums, std::uint64_t seed, std::uint64_t step, std::int64_t first_key,
                 Array<std::int64_t> token) {
  for_all(
      execution, "draw_tokens", token.size, KOKKOS_LAMBDA(std::int64_t f) {
        const double total = sums[sums.size - 1];
        if (clocks[f] < window || !(total > 0.0)) {
          token[f] = -1;
          return;
        }
        // Initial values have step 0.
        const Random4 random = philox(seed, Purpose::encoder_initial, step, static_cast<std::uint64_t>(first_key + f));
        const double at = uniform_double(random.word[0], random.word[1]) * total;
        std::int64_t low = 0, high = sums.size - 1;  // the first token whose sum is above `at`
        while (low < high) {
          const std::int64_t middle = low + (high - low) / 2;
          if (sums[middle] > at)
            high = middle;
          else
            low = middle + 1;
        }
        token[f] = low;
      });
}

void direct_rows(const Execution& execution, Array<const std::int64_t> token, AnyMatrix source, float factor,
                 Matrix<float> rows) {
  for_teams(
      execution, "direct_rows", token.size, sizeof(ResampleScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank(), n = token[row];
        if (n < 0) return;
        ResampleScratch& buffer = scratch<ResampleScratch>(team);
        const double square = row_square(team, source, n, buffer);
        if (!finite(square) || square == 0.0) return;
        const float scale = static_cast<float>(static_cast<double>(factor) / sqrt(square));
        for_chunks(source.columns, source.columns, [&](std::int64_t column, int count) {
          const float* value = row_chunk(team, source, n, column, count, buffer.value);
          float* const out = rows.row(row) + column;
          for_columns(team, count, [&](int c) { out[c] = scale * value[c]; });
        });
      });
}

void reset_moments(const Execution& execution, Array<const std::int64_t> token, const ParameterRows& parameters) {
  const ParameterRows p = parameters;
  for_all(
      execution, "reset_moments", token.size * p.columns, KOKKOS_LAMBDA(std::int64_t i) {
        if (token[i / p.columns] < 0) return;
        if (p.storage == StorageType::fp32) {
          static_cast<float*>(p.first_moment)[i] = 0.0f;
          static_cast<float*>(p.second_moment)[i] = 0.0f;
        } else if (p.storage == StorageType::bf16) {
          static_cast<std::uint16_t*>(p.first_moment)[i] = 0;
          static_cast<std::uint16_t*>(p.second_moment)[i] = 0;
        } else {
          static_cast<std::uint8_t*>(p.first_moment)[i] = 0;
          static_cast<std::uint8_t*>(p.second_moment)[i] = 0;
        }
      });
  if (p.storage != StorageType::eight_bit) return;
  const std::int64_t blocks = p.blocks_per_row();
  for_all(
      execution, "reset_scales", token.size * blocks, KOKKOS_LAMBDA(std::int64_t i) {
        if (token[i / blocks] < 0) return;
        p.first_scale[i] = 0.0f;
        p.second_scale[i] = 0.0f;
      });
}

void reset_elements(const Execution& execution, Array<const std::int64_t> token, float value,
                    const ParameterVector& parameters) {
  const ParameterVector p = parameters;
  for_all(
      execution, "reset_elements", token.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (token[i] < 0) return;
        p.weight[i] = value;
        p.first_moment[i] = p.second_moment[i] = 0.0f;
      });
}

void reset_clocks(const Execution& execution, Array<const std::int64_t> token, Array<std::int64_t> clocks) {
  for_all(
      execution, "reset_clocks", token.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (token[i] >= 0) clocks[i] = 0;
      });
}

}  // namespace weft::kernels
