// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. nf4 reads 0.5 bytes per weight and writes 2, int8 reads 1. Threads of a warp read and write adjacent
// words of 8 columns, several before the first is written; the 16 values of nf4 lie in different banks of shared
// memory.
#include "kernels/matrix_cuda.cuh"
#include "kernels/optimize/packed_weights.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;        // columns of a word
constexpr int kWordsAtOnce = 4;  // that a thread reads before it writes one
static_assert(kPackedColumns % kWidth == 0, "a word has one scale");

template <Packing kPacking>
using Word = std::conditional_t<kPacking == Packing::nf4, std::uint32_t, uint2>;

template <Packing kPacking>
__device__ __forceinline__ void unpack_word(Word<kPacking> word, float unit, const float* normal,
                                            float (&value)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float code;
    if constexpr (kPacking == Packing::nf4) {
      // The first column of a byte is its upper half.
      code = normal[word >> (8 * (i / 2) + (i % 2 == 0 ? 4 : 0)) & 15u];
    } else {
      const std::uint32_t half = i < 4 ? word.x : word.y;
      code = static_cast<float>(static_cast<std::int8_t>(half >> (8 * (i % 4)) & 255u));
    }
    value[i] = float{to_bf16(__fmul_rn(unit, code))};
  }
}

__device__ __forceinline__ float unit_of(const ParameterRows& p, std::int64_t row, std::int64_t column) {
  const float2 scales = __ldg(reinterpret_cast<const float2*>(p.row_scales) + row);
  const std::uint8_t code = __ldg(p.block_scales + row * packed_blocks(p.columns) + column / kPackedColumns);
  return packed_unit(p.packing, packed_scale(code, scales.x, scales.y));
}

template <Packing kPacking>
__global__ void __launch_bounds__(kThreads) unpack_words(ParameterRows p, std::int64_t row_begin, AnyMatrix out) {
  __shared__ float normal[16];
  if (threadIdx.x < 16) normal[threadIdx.x] = normal_value(static_cast<int>(threadIdx.x));
  __syncthreads();
  p.packing = kPacking;
  const std::int64_t per_row = p.columns / kWidth, total = out.rows * per_row;
  const auto* const words = static_cast<const Word<kPacking>*>(p.weight) + row_begin * per_row;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * (kThreads * kWordsAtOnce) + threadIdx.x;
  Word<kPacking> word[kWordsAtOnce];
#pragma unroll
  for (int i = 0; i < kWordsAtOnce; ++i)
    if (first + i * kThreads < total) word[i] = __ldcs(words + first + i * kThreads);
#pragma unroll
  for (int i = 0; i < kWordsAtOnce; ++i) {
    const std::int64_t at = first + i * kThreads;
    if (at >= total) return;
    const std::int64_t row = at / per_row, column = (at - row * per_row) * kWidth;
    float value[kWidth];
    unpack_word<kPacking>(word[i], unit_of(p, row_begin + row, column), normal, value);
    store_columns(out, row, column, value);
  }
}

/// Kernels that start early read weights before they wait for the kernel before them (launch_cuda.cuh). After this one,
/// which starts when the unpacked weights are in memory, they may.
__global__ void unpacked() {}

/// Any number of columns, any alignment.
__global__ void __launch_bounds__(kThreads) unpack_any(ParameterRows p, std::int64_t row_begin, AnyMatrix out) {
  const std::int64_t total = out.rows * p.columns, bytes = packed_bytes(p.packing, p.columns);
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= total) return;
  const std::int64_t row = at / p.columns, column = at - row * p.columns;
  const std::uint8_t* const codes = static_cast<const std::uint8_t*>(p.weight) + (row_begin + row) * bytes;
  const float code = p.packing == Packing::nf4 ? normal_value(codes[column / 2] >> (column % 2 == 0 ? 4 : 0) & 15)
                                               : static_cast<float>(static_cast<std::int8_t>(codes[column]));
  const float value[1] = {float{to_bf16(__fmul_rn(unit_of(p, row_begin + row, column), code))}};
  store_columns(out, row, column, value);
}

}  // namespace

void unpack_weights(const Execution& execution, const ParameterRows& p, std::int64_t row_begin, AnyMatrix out) {
  if (out.rows == 0) return;
  const cudaStream_t queue = stream_of(execution);
  if (p.columns % kWidth == 0 && is_aligned(p.weight, 8) && has_vectors(out)) {
    const unsigned grid = blocks_for(out.rows * p.columns / kWidth, kThreads * kWordsAtOnce);
    const auto kernel = p.packing == Packing::nf4 ? unpack_words<Packing::nf4> : unpack_words<Packing::int8>;
    kernel<<<grid, kThreads, 0, queue>>>(p, row_begin, out);
  } else {
    unpack_any<<<blocks_for(out.rows * p.columns, kThreads), kThreads, 0, queue>>>(p, row_begin, out);
  }
  unpacked<<<1, 1, 0, queue>>>();
  require_launch("unpack_weights");
}

}  // namespace weft::kernels::cuda
