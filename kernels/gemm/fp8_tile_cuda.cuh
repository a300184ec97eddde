// SPDX-License-Identifier: Apache-2.0
//
// Coding of a matrix by tiles, whatever forms its elements: codes, their transpose and the largest magnitude in one
// pass. Limit: memory, 4 bytes per element of a bf16 matrix that is coded in both forms.
//
// A block has a tile of 128 x 128 elements; a thread codes 4 rows of 8 columns at a time, stores 8 codes of each row,
// and leaves 4 codes of each column, transposed in registers, in shared memory. From there half a warp stores 128 codes
// of a column. Words of a column are permuted by the number of its group of columns, so that neither access has
// conflicts between banks.
#pragma once

#include "kernels/gemm/fp8.hpp"
#include "kernels/matrix_cuda.cuh"

namespace weft::kernels::cuda {

constexpr int kCodeTile = kCodeRows, kCodeThreads = 256;

/// Codes of two values, the first in the low byte.
template <CodeType type>
__device__ __forceinline__ std::uint32_t code_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  if constexpr (type == CodeType::e4m3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return code_of_value(type, low) | static_cast<std::uint32_t>(code_of_value(type, high)) << 8;
#endif
}

/// Word r of the result: byte r of each word, in their order.
__device__ __forceinline__ void transpose_bytes(const std::uint32_t (&from)[4], std::uint32_t (&to)[4]) {
  const std::uint32_t a = __byte_perm(from[0], from[1], 0x5140), b = __byte_perm(from[0], from[1], 0x7362),
                      c = __byte_perm(from[2], from[3], 0x5140), d = __byte_perm(from[2], from[3], 0x7362);
  to[0] = __byte_perm(a, c, 0x5410);
  to[1] = __byte_perm(a, c, 0x7632);
  to[2] = __byte_perm(b, d, 0x5410);
  to[3] = __byte_perm(b, d, 0x7632);
}

/// Raises *largest to the largest `value` of the block.
__device__ __forceinline__ void raise_largest(std::int32_t value, std::int32_t* largest) {
  __shared__ std::int32_t part[kCodeThreads / kWarp];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, offset));
  if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int w = 1; w < kCodeThreads / kWarp; ++w) value = max(value, part[w]);
  // Most blocks find a larger value there. What is read may be old, and then smaller.
  if (value > *static_cast<volatile std::int32_t*>(largest)) atomicMax(largest, value);
}

/// Stores the sums over the rows of a tile. sum: of 8 rows in the 8 columns of the thread's group.
__device__ __forceinline__ void store_sums(const float (&sum)[8], const Matrix<float>& sums, std::int64_t row_tile,
                                           std::int64_t first_column, std::int64_t columns) {
  __shared__ float part[16][kCodeTile + 4];
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < 8; ++i) part[thread / 16][thread % 16 * 8 + i] = sum[i];
  __syncthreads();
  if (thread >= kCodeTile || first_column + thread >= columns) return;
  float total = 0.0f;
#pragma unroll
  for (int line = 0; line < 16; ++line) total += part[line][thread];
  sums(row_tile, first_column + thread) = total;
}

/// Source: load(row, column, x) gives 8 elements, first_column(tile) the first column of a tile; sizes are multiples of
/// kCodedMultiple. across: tiles of a row.
template <class Source, CodeType type, bool with_sums>
__global__ void __launch_bounds__(kCodeThreads)
    code_tiles(const __grid_constant__ Source source, std::int64_t rows, std::int64_t columns, std::int64_t across,
               const __grid_constant__ Coding to) {
  __shared__ alignas(16) std::uint32_t tile[kCodeTile][kCodeTile / 4];
  const int thread = static_cast<int>(threadIdx.x), group = thread % 16;
  const std::int64_t first_row = blockIdx.x / across * kCodeTile,
                     first_column = source.first_column(blockIdx.x % across);
  const float inverse = 1.0f / *to.scale;  // a power of two
  std::int32_t most = 0;
  float sum[8] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = half * 16 + thread / 16;  // of 4 rows
    const std::int64_t row = first_row + line * 4, column = first_column + group * 8;
    if (row >= rows || column >= columns) continue;
    float x[4][8];
#pragma unroll
    for (int r = 0; r < 4; ++r) source.load(row + r, column, x[r]);
    std::int32_t most_here = 0;
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int i = 0; i < 8; ++i) most_here = max(most_here, magnitude_bits(x[r][i]));
    most = max(most, most_here);
    if constexpr (with_sums)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += (x[0][i] + x[1][i]) + (x[2][i] + x[3][i]);
    const bool finite = most_here < kInfinityBits;
    std::uint32_t low[4], high[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (!finite && magnitude_bits(x[r][i]) >= kInfinityBits) x[r][i] = __uint_as_float(0x7fc00000u);
        x[r][i] *= inverse;
      }
      low[r] = code_pair<type>(x[r][0], x[r][1]) | code_pair<type>(x[r][2], x[r][3]) << 16;
      high[r] = code_pair<type>(x[r][4], x[r][5]) | code_pair<type>(x[r][6], x[r][7]) << 16;
      if (to.codes.data != nullptr)
        *reinterpret_cast<uint2*>(to.codes.row(row + r) + column) = make_uint2(low[r], high[r]);
    }
    if (to.transposed.data == nullptr) continue;
    std::uint32_t first[4], second[4];
    transpose_bytes(low, first);
    transpose_bytes(high, second);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tile[group * 8 + i][line ^ (2 * group)] = first[i];
      tile[group * 8 + 4 + i][line ^ (2 * group)] = second[i];
    }
  }
  if (to.transposed.data != nullptr) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCodeTile * 16 / kCodeThreads; ++i) {
      const int column = i * (kCodeThreads / 16) + thread / 16, pair = thread % 16;
      const std::int64_t row = first_row + pair * 8;
      if (first_column + column >= columns || row >= rows) continue;
      *reinterpret_cast<uint2*>(to.transposed.row(first_column + column) + row) =
          *reinterpret_cast<const uint2*>(&tile[column][2 * (pair ^ (column / 8))]);
    }
  }
  if constexpr (with_sums) store_sums(sum, to.sums, blockIdx.x / across, first_column, columns);
  if (to.largest != nullptr) raise_largest(most, to.largest);
}

/// True if the codes can be stored 8 at a time.
inline bool tiles_fit(std::int64_t rows, std::int64_t columns, const Coding& to) {
  const auto fits = [](const Matrix<std::uint8_t>& codes) {
    return codes.data == nullptr || (is_aligned(codes.data, 8) && codes.stride % 8 == 0);
  };
  return rows % kCodedMultiple == 0 && columns % kCodedMultiple == 0 && fits(to.codes) && fits(to.transposed);
}

/// Codes a matrix [rows, columns] whose elements `source` gives; type: that of `to`.
template <CodeType type, class Source>
void code_by_tiles(const Execution& execution, const char* name, const Source& source, std::int64_t rows,
                   std::int64_t columns, const Coding& to) {
  if (rows == 0 || columns == 0) return;
  const unsigned across = blocks_for(columns, kCodeTile), blocks = blocks_for(rows, kCodeTile) * across;
  const auto launch = [&](auto kernel) {
    kernel<<<blocks, kCodeThreads, 0, stream_of(execution)>>>(source, rows, columns, across, to);
  };
  if (to.sums.data != nullptr)
    launch(code_tiles<Source, type, true>);
  else
    launch(code_tiles<Source, type, false>);
  require_launch(name);
}

}  // namespace weft::kernels::cuda
