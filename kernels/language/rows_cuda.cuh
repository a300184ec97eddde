// SPDX-License-Identifier: Apache-2.0
//
// Shared by the row-wise CUDA kernels of language models: sums over a row that one warp or one block holds in
// registers, and columns in the form in which they are stored.
#pragma once

#include "kernels/matrix_cuda.cuh"

namespace weft::kernels::cuda {

/// Sum over the kThreads threads that share a row: a warp, or a whole block, all of whose threads call this. The same
/// on every thread; order fixed.
template <int kThreads>
__device__ __forceinline__ float row_sum(float value) {
  value = warp_sum(value);
  if constexpr (kThreads > kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ float part[kWarps];
    __syncthreads();  // the sum before may still be read
    if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += part[w];
  }
  return value;
}

constexpr int kWarpRows = 8;      ///< rows of a block whose rows have one warp each
constexpr int kRowThreads = 256;  ///< of a block that has one row
constexpr std::int64_t kMostRegisterColumns = kRowThreads * 8 * 4;

/// Row of this thread, for kernels that `launch_rows` starts; threads that share a row are the kThreads first, next, …
template <int kThreads>
__device__ __forceinline__ std::int64_t row_of_thread() {
  if constexpr (kThreads == kWarp)
    return static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  else
    return blockIdx.x;
}

/// Calls launch.template operator()<kThreads, kVectors>(blocks, threads) with the threads that share a row and the
/// groups of 8 columns that each of them holds in registers. columns: a multiple of 8, at most kMostRegisterColumns.
template <class Launch>
void launch_rows(std::int64_t rows, std::int64_t columns, const Launch& launch) {
  const std::int64_t vectors = columns / 8;
  if (rows == 0) return;
  if (vectors <= 4 * kWarp) {
    const unsigned blocks = blocks_for(rows, kWarpRows), threads = kWarpRows * kWarp;
    switch ((vectors + kWarp - 1) / kWarp) {
      case 1:
        return launch.template operator()<kWarp, 1>(blocks, threads);
      case 2:
        return launch.template operator()<kWarp, 2>(blocks, threads);
      case 3:
        return launch.template operator()<kWarp, 3>(blocks, threads);
      default:
        return launch.template operator()<kWarp, 4>(blocks, threads);
    }
  }
  const unsigned blocks = static_cast<unsigned>(rows), threads = kRowThreads;
  switch ((vectors + kRowThreads - 1) / kRowThreads) {
    case 1:
      return launch.template operator()<kRowThreads, 1>(blocks, threads);
    case 2:
      return launch.template operator()<kRowThreads, 2>(blocks, threads);
    case 3:
      return launch.template operator()<kRowThreads, 3>(blocks, threads);
    default:
      return launch.template operator()<kRowThreads, 4>(blocks, threads);
  }
}

/// Eight fp32 that many rows share, through the read-only cache.
__device__ __forceinline__ void load_shared_by_rows(const float* from, float (&value)[8]) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
  value[0] = a.x, value[1] = a.y, value[2] = a.z, value[3] = a.w;
  value[4] = b.x, value[5] = b.y, value[6] = b.z, value[7] = b.w;
}

/// Eight columns as they are stored, to be loaded before they are needed. kWide: the matrix may be fp32.
template <bool kWide>
struct StoredColumns {
  uint4 word[kWide ? 2 : 1];

  __device__ __forceinline__ void load(const AnyMatrix& matrix, std::int64_t row, std::int64_t column) {
    const bool fp32 = kWide && matrix.type == Scalar::fp32;
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const char*>(matrix.data) +
                                                      (row * matrix.stride + column) * (fp32 ? 4 : 2));
    word[0] = __ldcs(from);
    if constexpr (kWide)
      if (fp32) word[1] = __ldcs(from + 1);
  }
  __device__ __forceinline__ void values(Scalar type, float (&value)[8]) const {
    if constexpr (kWide) {
      if (type == Scalar::fp32) {
        value[0] = __uint_as_float(word[0].x), value[1] = __uint_as_float(word[0].y);
        value[2] = __uint_as_float(word[0].z), value[3] = __uint_as_float(word[0].w);
        value[4] = __uint_as_float(word[1].x), value[5] = __uint_as_float(word[1].y);
        value[6] = __uint_as_float(word[1].z), value[7] = __uint_as_float(word[1].w);
        return;
      }
    }
    unpack8(type, word[0], value);
  }
};

/// Eight columns that are soon read again: unlike `load_columns`, leaves them in the second-level cache.
__device__ __forceinline__ void load_columns_again(const AnyMatrix& matrix, std::int64_t row, std::int64_t column,
                                                   float (&value)[8]) {
  const std::int64_t at = row * matrix.stride + column;
  if (matrix.type == Scalar::fp32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(matrix.data) + at);
    const float4 a = from[0], b = from[1];
    value[0] = a.x, value[1] = a.y, value[2] = a.z, value[3] = a.w;
    value[4] = b.x, value[5] = b.y, value[6] = b.z, value[7] = b.w;
  } else {
    unpack8(matrix.type, *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(matrix.data) + at), value);
  }
}

/// Values as a matrix of this type stores them.
__device__ __forceinline__ void round_as(Scalar type, float (&value)[8]) {
  if (type != Scalar::fp32) unpack8(type, pack8(type, value), value);
}

}  // namespace weft::kernels::cuda
