// SPDX-License-Identifier: Apache-2.0
//
// Words of packed weights, as the threads of a GPU read them: eight columns, which have one scale.
#pragma once

#include <type_traits>

#include "kernels/optimize/packed_weights.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

constexpr int kWordColumns = 8;
static_assert(kPackedColumns % kWordColumns == 0, "a word has one scale");

template <Packing kPacking>
using PackedWord = std::conditional_t<kPacking == Packing::nf4, std::uint32_t, uint2>;

/// True if rows consist of whole words at aligned addresses.
inline bool has_packed_words(const ParameterRows& p) {
  return p.columns % kWordColumns == 0 && is_aligned(p.weight, sizeof(uint2)) && is_aligned(p.row_scales, 8);
}

/// Fills the table of the values of nf4, whose entries lie in different banks of shared memory. The caller
/// synchronises.
__device__ __forceinline__ void load_normal_values(float (&normal)[16]) {
  // Constants: a table that a thread indexes would be in its local memory.
#pragma unroll
  for (int code = 0; code < 16; ++code)
    if (threadIdx.x == code) normal[code] = normal_value(code);
}

/// The weights of a word, rounded to bf16.
template <Packing kPacking>
__device__ __forceinline__ void unpack_word(PackedWord<kPacking> word, float unit, const float (&normal)[16],
                                            float (&value)[kWordColumns]) {
#pragma unroll
  for (int i = 0; i < kWordColumns; ++i) {
    float code;
    if constexpr (kPacking == Packing::nf4) {
      // The first column of a byte is its upper half.
      code = normal[word >> (8 * (i / 2) + (i % 2 == 0 ? 4 : 0)) & 15u];
    } else {
      const std::uint32_t four = i < 4 ? word.x : word.y;
      code = static_cast<float>(static_cast<std::int8_t>(four >> (8 * (i % 4)) & 255u));
    }
    value[i] = __fmul_rn(unit, code);
  }
  unpack8(pack8(value), value);
}

/// What the codes around a column are multiplied by.
template <Packing kPacking>
__device__ __forceinline__ float packed_unit_at(const ParameterRows& p, std::int64_t row, std::int64_t column) {
  const float2 scales = __ldg(reinterpret_cast<const float2*>(p.row_scales) + row);
  const std::uint8_t code = __ldg(p.block_scales + row * packed_blocks(p.columns) + column / kPackedColumns);
  return packed_unit(kPacking, packed_scale(code, scales.x, scales.y));
}

}  // namespace weft::kernels::cuda
