// SPDX-License-Identifier: Apache-2.0
//
// Limit of the coding: memory, 3 bytes per element in bf16: a row is read once and held in registers by a warp or a
// block. Matrices that are coded by columns, weights alone, take the portable kernels, as do rows of more than 8,192
// columns.
#include <cublasLt.h>

#include "kernels/gemm/fp8.hpp"
#include "kernels/gemm/gemm_cuda.hpp"
#include "kernels/language/rows_cuda.cuh"
#include "kernels/optimize/codec.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::code_rows) code_rows;
}  // namespace portable

namespace cuda {
namespace {

/// As row_sum, of largest values.
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

}  // namespace

void code_rows(const Execution& execution, AnyMatrix from, Form form, const CodedRows& to) {
  if (form == Form::transposed || from.columns > kMostRegisterColumns || !vectors_fit(from.columns, from))
    return portable::code_rows(execution, from, form, to);
  launch_rows(from.rows, from.columns, [&]<int kThreads, int kVectors>(unsigned blocks, unsigned threads) {
    code<kThreads, kVectors><<<blocks, threads, 0, stream_of(execution)>>>(from, to.codes.data, to.scales.data);
  });
  require_launch("code_rows");
}

std::int64_t gemm_coded_workspace(Backend, std::int64_t, std::int64_t, std::int64_t) { return kGemmWorkspace; }

void gemm_coded(const Execution& execution, const CodedRows& x, const CodedRows& weight, AnyMatrix y,
                Array<std::byte> workspace) {
  const GemmShape shape{.rows = y.rows,
                        .columns = y.columns,
                        .inner = x.codes.columns,
                        .a_stride = x.codes.stride,
                        .b_stride = weight.codes.stride,
                        .c_stride = y.stride,
                        .input = Scalar::u8,
                        .output = y.type};
  multiply_coded(execution, shape, x.codes.data, x.scales.data, weight.codes.data, weight.scales.data, y.data,
                 workspace);
}

std::string coded_obstacle(Backend) {
  constexpr std::size_t kFirstVersion = 120900;  // of the library, with a scale per row
  int device = 0, major = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9) return "cuBLASLt has products in 8 bits with a scale per row for compute capability 9.0 only";
  if (cublasLtGetVersion() < kFirstVersion) return "cuBLASLt has products in 8 bits with a scale per row from 12.9 on";
  return "";
}

}  // namespace cuda
}  // namespace weft::kernels
