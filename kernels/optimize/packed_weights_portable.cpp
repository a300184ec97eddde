// SPDX-License-Identifier: Apache-2.0
#include <cfloat>

#include "kernels/optimize/packed_weights.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {
namespace {

/// Nearest code of nf4: the number of middles between two values that are below.
KOKKOS_FORCEINLINE_FUNCTION int normal_code(float value) {
  int code = 0;
  for (int i = 0; i < 15; ++i) code += value > 0.5f * (normal_value(i) + normal_value(i + 1)) ? 1 : 0;
  return code;
}

/// `value` rounded to nearest, at most `most` in magnitude; 0 for NaN.
KOKKOS_FORCEINLINE_FUNCTION int bounded_code(float value, float most) {
  const float nearest = ::rintf(value);
  if (!(nearest >= -most)) return nearest < 0 ? -static_cast<int>(most) : 0;
  return static_cast<int>(nearest > most ? most : nearest);
}

}  // namespace

void pack_weights(const Execution& execution, const ParameterRows& packed, std::int64_t row_begin,
                  Matrix<const float> in) {
  const ParameterRows p = packed;
  const bool normal = p.packing == Packing::nf4;
  const std::int64_t blocks = packed_blocks(p.columns), bytes = packed_bytes(p.packing, p.columns);
  for_teams(
      execution, "pack_weights", in.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = row_begin + team.league_rank();
        const float* weight = in.row(team.league_rank());
        const auto end_of = [&](std::int64_t block) {
          const std::int64_t end = (block + 1) * kPackedColumns;
          return end < p.columns ? end : p.columns;
        };
        const auto largest = [&](int block) {
          float most = 0;
          for (std::int64_t c = block * kPackedColumns; c < end_of(block); ++c) {
            const float magnitude = ::fabsf(weight[c]);
            most = magnitude > most ? magnitude : most;
          }
          return most;
        };
        const int n_blocks = static_cast<int>(blocks);
        const float most = max_columns(team, n_blocks, 0.0f, largest);
        const float least = -max_columns(team, n_blocks, -FLT_MAX, [&](int block) { return -largest(block); });
        const int bad =
            sum_columns<int>(team, static_cast<int>(p.columns), [&](int c) { return is_finite(weight[c]) ? 0 : 1; });
        const float nan = bits_float(0x7fc00000u);
        // Halves of both: their sum is finite.
        const float middle = bad != 0 ? nan : 0.5f * most + 0.5f * least;
        const float step = bad != 0 ? nan : (most - least) * (1.0f / 254.0f);
        const float inverse_step = step < 0x1p-100f ? 0.0f : 1.0f / step;
        once(team, [&] {
          p.row_scales[row * kRowScales] = middle;
          p.row_scales[row * kRowScales + 1] = step;
        });
        std::uint8_t* const scales = p.block_scales + row * blocks;
        std::uint8_t* const codes = static_cast<std::uint8_t*>(p.weight) + row * bytes;
        for_columns(team, n_blocks, [&](int block) {
          const auto scale_code =
              static_cast<std::uint8_t>(127 + bounded_code((largest(block) - middle) * inverse_step, 127.0f));
          scales[block] = scale_code;
          const float inverse = packed_inverse(p.packing, packed_scale(scale_code, middle, step));
          const std::int64_t begin = block * kPackedColumns, end = end_of(block);
          if (normal) {
            for (std::int64_t c = begin; c < end; c += 2) {
              const int first = normal_code(weight[c] * inverse),
                        second = c + 1 < end ? normal_code(weight[c + 1] * inverse) : 0;
              codes[c / 2] = static_cast<std::uint8_t>(first << 4 | second);
            }
          } else {
            for (std::int64_t c = begin; c < end; ++c)
              codes[c] = static_cast<std::uint8_t>(bounded_code(weight[c] * inverse, 127.0f));
          }
        });
      });
}

namespace portable {

void unpack_weights(const Execution& execution, const ParameterRows& packed, std::int64_t row_begin, AnyMatrix out) {
  const ParameterRows p = packed;
  const bool normal = p.packing == Packing::nf4;
  const std::int64_t blocks = packed_blocks(p.columns), bytes = packed_bytes(p.packing, p.columns);
  for_teams(
      execution, "unpack_weights", out.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = row_begin + team.league_rank();
        const float middle = p.row_scales[row * kRowScales], step = p.row_scales[row * kRowScales + 1];
        const std::uint8_t* const codes = static_cast<const std::uint8_t*>(p.weight) + row * bytes;
        for (std::int64_t block = 0; block < blocks; ++block) {
          const float unit = packed_unit(p.packing, packed_scale(p.block_scales[row * blocks + block], middle, step));
          const std::int64_t column = block * kPackedColumns;
          const std::uint8_t* const from = codes + (normal ? column / 2 : column);
          // Rounded to bf16 first, so that fp32 outputs are the same numbers.
          store_chunk(team, out, team.league_rank(), column, smaller(kPackedColumns, p.columns - column), [&](int c) {
            const float value = normal ? normal_value(from[c / 2] >> (c % 2 == 0 ? 4 : 0) & 15)
                                       : static_cast<float>(static_cast<std::int8_t>(from[c]));
            return float{to_bf16(unit * value)};
          });
        }
      });
}

}  // namespace portable
}  // namespace weft::kernels
