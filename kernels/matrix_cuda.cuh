// SPDX-License-Identifier: Apache-2.0
//
// Columns of an AnyMatrix as fp32, one, four or eight at a time, and element-wise kernels over them.
#pragma once

#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

/// True if every row can be read eight columns at a time.
inline bool has_vectors(const AnyMatrix& matrix) { return matrix.stride % 8 == 0 && is_aligned(matrix.data, 32); }

__device__ __forceinline__ void load_columns(const AnyMatrix& matrix, std::int64_t row, std::int64_t column,
                                             float (&value)[1]) {
  value[0] = load_element(matrix.data, matrix.type, row * matrix.stride + column);
}

__device__ __forceinline__ void load_columns(const AnyMatrix& matrix, std::int64_t row, std::int64_t column,
                                             float (&value)[8]) {
  const std::int64_t at = row * matrix.stride + column;
  if (matrix.type == Scalar::fp32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(matrix.data) + at);
    const float4 a = __ldcs(from), b = __ldcs(from + 1);
    value[0] = a.x, value[1] = a.y, value[2] = a.z, value[3] = a.w;
    value[4] = b.x, value[5] = b.y, value[6] = b.z, value[7] = b.w;
    return;
  }
  unpack8(matrix.type, __ldcs(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(matrix.data) + at)),
          value);
}

__device__ __forceinline__ void load_columns(const AnyMatrix& matrix, std::int64_t row, std::int64_t column,
                                             float (&value)[4]) {
  const std::int64_t at = row * matrix.stride + column;
  if (matrix.type == Scalar::fp32) {
    const float4 word = __ldcs(reinterpret_cast<const float4*>(static_cast<const float*>(matrix.data) + at));
    value[0] = word.x, value[1] = word.y, value[2] = word.z, value[3] = word.w;
    return;
  }
  const uint2 word = __ldcs(reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(matrix.data) + at));
  float eight[8];
  unpack8(matrix.type, make_uint4(word.x, word.y, 0, 0), eight);
#pragma unroll
  for (int i = 0; i < 4; ++i) value[i] = eight[i];
}

__device__ __forceinline__ void store_columns(const AnyMatrix& matrix, std::int64_t row, std::int64_t column,
                                              const float (&value)[1]) {
  store_element(matrix.data, matrix.type, row * matrix.stride + column, value[0]);
}

__device__ __forceinline__ void store_columns(const AnyMatrix& matrix, std::int64_t row, std::int64_t column,
                                              const float (&value)[4]) {
  const std::int64_t at = row * matrix.stride + column;
  if (matrix.type == Scalar::fp32) {
    *reinterpret_cast<float4*>(static_cast<float*>(matrix.data) + at) =
        make_float4(value[0], value[1], value[2], value[3]);
  } else {
    const float eight[8] = {value[0], value[1], value[2], value[3]};
    const uint4 word = pack8(matrix.type, eight);
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(matrix.data) + at) = make_uint2(word.x, word.y);
  }
}

__device__ __forceinline__ void store_columns(const AnyMatrix& matrix, std::int64_t row, std::int64_t column,
                                              const float (&value)[8]) {
  const std::int64_t at = row * matrix.stride + column;
  if (matrix.type == Scalar::fp32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(matrix.data) + at);
    to[0] = make_float4(value[0], value[1], value[2], value[3]);
    to[1] = make_float4(value[4], value[5], value[6], value[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(matrix.data) + at) = pack8(matrix.type, value);
  }
}

/// True if all matrices with data can be read 8 columns at a time, in rows of `columns` columns.
template <class... Matrices>
bool vectors_fit(std::int64_t columns, const Matrices&... matrices) {
  return columns % 8 == 0 && ((matrices.data == nullptr || has_vectors(matrices)) && ...);
}

/// body.template step<kWidth>(row, column) for each group of kWidth columns.
template <int kWidth, class Body>
__global__ void each_vector(std::int64_t columns, const __grid_constant__ Body body) {
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kWidth;
  if (column < columns) body.template step<kWidth>(static_cast<std::int64_t>(blockIdx.x), column);
}

/// Blocks and threads over [rows, columns], 8 columns per thread if `vectors`.
struct VectorBlocks {
  dim3 grid;
  int threads;
};
inline VectorBlocks vector_blocks(std::int64_t rows, std::int64_t columns, bool vectors) {
  const std::int64_t steps = vectors ? columns / 8 : columns;
  const std::int64_t threads = steps >= 128 ? 128 : (steps + kWarp - 1) / kWarp * kWarp;
  return {dim3(static_cast<unsigned>(rows), blocks_for(steps, threads)), static_cast<int>(threads)};
}

/// Launches `each_vector` over [rows, columns], 8 columns at a time if `vectors`.
template <class Body>
void for_vectors(const Execution& execution, const char* name, std::int64_t rows, std::int64_t columns, bool vectors,
                 const Body& body) {
  if (rows == 0 || columns == 0) return;
  const auto [grid, threads] = vector_blocks(rows, columns, vectors);
  if (vectors)
    each_vector<8><<<grid, threads, 0, stream_of(execution)>>>(columns, body);
  else
    each_vector<1><<<grid, threads, 0, stream_of(execution)>>>(columns, body);
  require_launch(name);
}

}  // namespace weft::kernels::cuda
