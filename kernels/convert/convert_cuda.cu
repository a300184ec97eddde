// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory, one pass.
#include "kernels/convert/convert_cuda.hpp"
#include "kernels/matrix_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 8;  // share one read of mean and scale

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    normalise(AnyMatrix raw, const float* mean, const float* scale, AnyMatrix out, std::int32_t* flag) {
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kWidth;
  if (column >= raw.columns) return;
  float centre[kWidth], factor[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    centre[i] = mean[column + i];
    factor[i] = scale[column + i];
  }
  bool finite = true;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kRowsPerThread;
  const std::int64_t end = min(begin + kRowsPerThread, raw.rows);
  for (std::int64_t row = begin; row < end; ++row) {
    float value[kWidth];
    load_columns(raw, row, column, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      finite = finite && is_finite(value[i]);
      value[i] = (value[i] - centre[i]) * factor[i];
    }
    store_columns(out, row, column, value);
  }
  if (!finite) atomicOr(flag, 1);
}

}  // namespace

void normalise_rows(const Execution& execution, AnyMatrix raw, Array<const float> mean, Array<const float> scale,
                    AnyMatrix out, std::int32_t* flag) {
  if (raw.rows == 0 || raw.columns == 0) return;
  const cudaStream_t queue = stream_of(execution);
  const bool wide = raw.columns % 8 == 0 && has_vectors(raw) && has_vectors(out);
  const dim3 grid(blocks_for(raw.rows, kRowsPerThread), blocks_for(raw.columns, kThreads * (wide ? 8 : 1)));
  if (wide)
    normalise<8><<<grid, kThreads, 0, queue>>>(raw, mean.data, scale.data, out, flag);
  else
    normalise<1><<<grid, kThreads, 0, queue>>>(raw, mean.data, scale.data, out, flag);
  require_launch("normalise_rows");
}

}  // namespace weft::kernels::cuda
