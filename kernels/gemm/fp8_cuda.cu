// SPDX-License-Identifier: Apache-2.0
//
// Limit of the coding: memory, 3 bytes per element in bf16. A row is read once and held in registers by a warp or a
// block. Columns, of weights alone, are read twice, the second time from the cache. Other shapes (rows of more than
// 8,192 columns, columns that are no multiple of 8) take the portable kernels.
#include <cublasLt.h>

#include "kernels/gemm/fp8.hpp"
#include "kernels/gemm/gemm_cuda.hpp"
#include "kernels/language/rows_cuda.cuh"
#include "kernels/optimize/codec.hpp"

namespace weft::kernels::cuda {
namespace {

/// The largest value of a row, reduced like `row_sum`.
template <int kThreads>
__device__ __forceinline__ std::uint32_t row_max(std::uint32_t value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, offset));
  if constexpr (kThreads > kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ std::uint32_t part[kWarps];
    if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = value;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value = max(value, part[w]);
  }
  return value;
}

/// Codes of two values, the first in the low byte.
__device__ __forceinline__ std::uint32_t code2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return code_nearest(low) | static_cast<std::uint32_t>(code_nearest(high)) << 8;
#endif
}

template <int kThreads, int kVectors>
__global__ void __launch_bounds__(256)
    code(const __grid_constant__ AnyMatrix from, std::uint8_t* codes, float* scales) {
  const std::int64_t row = row_of_thread<kThreads>();
  if (row >= from.rows) return;
  const int thread = static_cast<int>(threadIdx.x % kThreads);
  float x[kVectors][8];
  std::uint32_t most = 0;  // magnitudes as integers: infinity and NaN are above all numbers
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t column = (v * kThreads + thread) * 8;
    if (column >= from.columns) continue;
    load_columns(from, row, column, x[v]);
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, float_bits(x[v][i]) & 0x7fffffffu);
  }
  const float scale = block_scale(bits_float(row_max<kThreads>(most))), inverse = inverse_scale(scale);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t column = (v * kThreads + thread) * 8;
    if (column >= from.columns) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[v][i] *= inverse;
    *reinterpret_cast<uint2*>(codes + row * from.columns + column) =
        make_uint2(code2(x[v][0], x[v][1]) | code2(x[v][2], x[v][3]) << 16,
                   code2(x[v][4], x[v][5]) | code2(x[v][6], x[v][7]) << 16);
  }
  if (thread == 0) scales[row] = scale;
}

// Columns: a block codes kStrip of them, kTile rows at a time; each thread reads 8 columns of a row. Codes pass through
// shared memory, so that a thread stores 8 of one column.
constexpr int kStrip = 16, kTile = 512, kColumnThreads = kTile * kStrip / 8;

__global__ void __launch_bounds__(kColumnThreads)
    code_columns(const __grid_constant__ AnyMatrix from, std::uint8_t* codes, float* scales) {
  __shared__ std::uint32_t largest[kStrip];
  __shared__ alignas(16) std::uint8_t tile[kStrip][kTile + 16];
  const int thread = static_cast<int>(threadIdx.x), side = thread % 2 * 8, line = thread / 2;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kStrip;
  const bool inside = first + side < from.columns;  // columns are a multiple of 8
  if (thread < kStrip) largest[thread] = 0;
  __syncthreads();

  std::uint32_t most[8] = {};
  if (inside)
#pragma unroll 4
    for (std::int64_t row = line; row < from.rows; row += kTile) {
      float x[8];
      load_columns_again(from, row, first + side, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) most[i] = max(most[i], float_bits(x[i]) & 0x7fffffffu);
    }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 1; offset /= 2)
      most[i] = max(most[i], __shfl_xor_sync(kAllLanes, most[i], offset));
    if (thread % kWarp < 2) atomicMax(largest + side + i, most[i]);
  }
  __syncthreads();
  float inverse[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) inverse[i] = inverse_scale(block_scale(bits_float(largest[side + i])));
  if (thread < kStrip && first + thread < from.columns)
    scales[first + thread] = block_scale(bits_float(largest[thread]));

  const int column = thread / (kTile / 8), rows_from = thread % (kTile / 8) * 8;  // what this thread stores
  for (std::int64_t begin = 0; begin < from.rows; begin += kTile) {
    if (inside && begin + line < from.rows) {
      float x[8];
      load_columns_again(from, begin + line, first + side, x);
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const std::uint32_t pair = code2(x[i] * inverse[i], x[i + 1] * inverse[i + 1]);
        tile[side + i][line] = static_cast<std::uint8_t>(pair & 0xffu);
        tile[side + i + 1][line] = static_cast<std::uint8_t>(pair >> 8);
      }
    }
    __syncthreads();
    if (first + column < from.columns && begin + rows_from < from.rows)
      *reinterpret_cast<uint2*>(codes + (first + column) * from.rows + begin + rows_from) =
          *reinterpret_cast<const uint2*>(&tile[column][rows_from]);
    __syncthreads();
  }
}

GemmShape shape_of(const CodedRows& x, const CodedRows& weight, const AnyMatrix& y) {
  return {.rows = y.rows,
          .columns = y.columns,
          .inner = x.codes.columns,
          .a_stride = x.codes.stride,
          .b_stride = weight.codes.stride,
          .c_stride = y.stride,
          .input = Scalar::u8,
          .output = y.type};
}

}  // namespace

void code_rows(const Execution& execution, AnyMatrix from, Form form, const CodedRows& to) {
  const bool by_columns = form == Form::transposed;
  if (!vectors_fit(from.columns, from) || (by_columns ? from.rows % 8 != 0 : from.columns > kMostRegisterColumns))
    return portable::code_rows(execution, from, form, to);
  if (by_columns) {
    if (from.columns == 0) return;
    code_columns<<<blocks_for(from.columns, kStrip), kColumnThreads, 0, stream_of(execution)>>>(from, to.codes.data,
                                                                                                to.scales.data);
    return require_launch("code_rows");
  }
  launch_rows(from.rows, from.columns, [&]<int kThreads, int kVectors>(unsigned blocks, unsigned threads) {
    code<kThreads, kVectors><<<blocks, threads, 0, stream_of(execution)>>>(from, to.codes.data, to.scales.data);
  });
  require_launch("code_rows");
}

std::int64_t gemm_coded_workspace(Backend, std::int64_t, std::int64_t, std::int64_t) { return kGemmWorkspace; }

void gemm_coded(const Execution& execution, const CodedRows& x, const CodedRows& weight, AnyMatrix y,
                Array<std::byte> workspace) {
  multiply_coded(execution, shape_of(x, weight, y), x.codes.data, x.scales.data, weight.codes.data, weight.scales.data,
                 y.data, workspace);
}

bool gemm_coded_with_bias(const Execution& execution, const CodedRows& x, const CodedRows& weight,
                          Array<const bf16> bias, AnyMatrix y, Array<std::byte> workspace) {
  GemmShape shape = shape_of(x, weight, y);
  shape.epilogue = Epilogue::Kind::bias;
  return y.type == Scalar::bf16 && is_aligned(bias.data, 16) &&
         multiply_coded(execution, shape, x.codes.data, x.scales.data, weight.codes.data, weight.scales.data, y.data,
                        workspace, bias.data);
}

std::string coded_obstacle(Backend) {
  constexpr std::size_t kFirstVersion = 120900;  // first version of the library with a scale per row
  int device = 0, major = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9) return "cuBLASLt has products in 8 bits with a scale per row for compute capability 9.0 only";
  if (cublasLtGetVersion() < kFirstVersion) return "cuBLASLt has products in 8 bits with a scale per row from 12.9 on";
  return "";
}

}  // namespace weft::kernels::cuda
