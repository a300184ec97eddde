// SPDX-License-Identifier: Apache-2.0
//
// Shapes and addresses that tiles do not fit take the portable kernels.
#include <algorithm>

#include "kernels/gemm/fp8_tile_cuda.cuh"
#include "kernels/gemm/gemm_cuda.hpp"

namespace weft::kernels::cuda {
namespace {

struct Stored {
  AnyMatrix from;

  __device__ __forceinline__ void load(std::int64_t row, std::int64_t column, float (&x)[8]) const {
    load_columns(from, row, column, x);
  }
  __device__ __forceinline__ std::int64_t first_column(std::int64_t tile) const { return tile * kCodeTile; }
};

constexpr unsigned kMostBlocks = 1056;  // of largest_of: 8 per multiprocessor of 132

__global__ void __launch_bounds__(kCodeThreads)
    largest_of(const __grid_constant__ AnyMatrix from, std::int32_t* largest) {
  const std::int64_t across = from.columns / 8, count = from.rows * across;
  std::int32_t most = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kCodeThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kCodeThreads) {
    float x[8];
    load_columns(from, i / across, i % across * 8, x);
#pragma unroll
    for (int c = 0; c < 8; ++c) most = max(most, magnitude_bits(x[c]));
  }
  raise_largest(most, largest);
}

GemmShape shape_of(const CodedMatrix& a, const CodedMatrix& b, const AnyMatrix& c, bool fast) {
  return {.rows = c.rows,
          .columns = c.columns,
          .inner = a.codes.columns,
          .a_stride = a.codes.stride,
          .b_stride = b.codes.stride,
          .c_stride = c.stride,
          .input = Scalar::u8,
          .output = c.type,
          .a_code = a.type,
          .b_code = b.type,
          .fast = fast};
}

}  // namespace

void code_matrix(const Execution& execution, AnyMatrix from, const Coding& to) {
  if (!vectors_fit(from.columns, from) || !tiles_fit(from.rows, from.columns, to))
    return portable::code_matrix(execution, from, to);
  if (to.type == CodeType::e4m3)
    code_by_tiles<CodeType::e4m3>(execution, "code_matrix", Stored{from}, from.rows, from.columns, to);
  else
    code_by_tiles<CodeType::e5m2>(execution, "code_matrix", Stored{from}, from.rows, from.columns, to);
}

void largest_magnitude(const Execution& execution, AnyMatrix from, std::int32_t* largest) {
  if (!vectors_fit(from.columns, from)) return portable::largest_magnitude(execution, from, largest);
  const unsigned needed = blocks_for(from.rows * from.columns / 8, kCodeThreads),
                 blocks = std::min(needed, kMostBlocks);
  if (blocks == 0) return;
  largest_of<<<blocks, kCodeThreads, 0, stream_of(execution)>>>(from, largest);
  require_launch("largest_magnitude");
}

std::int64_t gemm_coded_workspace(Backend, Scalar, std::int64_t, std::int64_t, std::int64_t) { return kGemmWorkspace; }

void gemm_coded(const Execution& execution, const CodedMatrix& a, const CodedMatrix& b, float beta, AnyMatrix c,
                bool fast, Array<std::byte> workspace) {
  multiply_coded(execution, shape_of(a, b, c, fast), a.codes.data, a.scale, b.codes.data, b.scale, beta, c.data,
                 workspace);
}

bool gemm_coded_with_bias(const Execution& execution, const CodedMatrix& a, const CodedMatrix& b,
                          Array<const bf16> bias, AnyMatrix c, Array<std::byte> workspace) {
  GemmShape shape = shape_of(a, b, c, true);
  shape.epilogue = Epilogue::Kind::bias;
  return c.type == Scalar::bf16 && is_aligned(bias.data, 16) &&
         multiply_coded(execution, shape, a.codes.data, a.scale, b.codes.data, b.scale, 0.0f, c.data, workspace,
                        bias.data);
}

std::string coded_obstacle(Backend) {
  int device = 0, major = 0, minor = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  require(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  if (major * 10 + minor < 89)
    return "GPUs multiply in 8 bits from compute capability 8.9 on, this one has " + std::to_string(major) + "." +
           std::to_string(minor);
  return "";
}

}  // namespace weft::kernels::cuda
