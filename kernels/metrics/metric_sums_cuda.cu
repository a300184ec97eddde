// SPDX-License-Identifier: Apache-2.0
#include "kernels/metrics/metric_sums.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowLanes = kThreads / kWarp;

/// A block owns 32 columns, one per lane; its warps take rows in turn and their sums are added in order.
__global__ void __launch_bounds__(kThreads)
    sum_dimensions(AnyMatrix y, AnyMatrix reconstruction, const float* mean, const float* spread, const float* pivot,
                   DimensionSums sums) {
  __shared__ double total[4][kRowLanes][kWarp];
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kWarp + lane;
  double sum[4] = {};
  if (column < y.columns) {
    const double centre = mean[column], factor = spread[column], origin = pivot[column];
    for (std::int64_t row = warp; row < y.rows; row += kRowLanes) {
      const double value = load_element(y.data, y.type, row * y.stride + column);
      const double estimate =
          load_element(reconstruction.data, reconstruction.type, row * reconstruction.stride + column);
      const double error = value - (estimate * factor + centre);
      const double shifted = value - origin;
      sum[0] += error;
      sum[1] += error * error;
      sum[2] += shifted;
      sum[3] += shifted * shifted;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) total[i][warp][lane] = sum[i];
  __syncthreads();
  if (warp >= 4 || column >= y.columns) return;
  double all = 0.0;
  for (int w = 0; w < kRowLanes; ++w) all += total[warp][w][lane];
  double* const out[4] = {sums.error.data, sums.squared_error.data, sums.target.data, sums.squared_target.data};
  out[warp][column] += all;
}

__global__ void add_firing(const std::int64_t* offsets, std::int64_t n_keys, std::int64_t* fired) {
  const std::int64_t key = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (key < n_keys) fired[key] += offsets[key + 1] - offsets[key];
}

__global__ void move_clocks(const std::int64_t* offsets, std::int64_t n_keys, std::int64_t tokens, const AdamStep* step,
                            std::int64_t* since) {
  const std::int64_t key = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (key < n_keys && step->withheld == 0) since[key] = offsets[key + 1] > offsets[key] ? 0 : since[key] + tokens;
}

}  // namespace

void accumulate_dimensions(const Execution& execution, AnyMatrix y, AnyMatrix reconstruction, Array<const float> mean,
                           Array<const float> spread, Array<const float> pivot, DimensionSums sums) {
  if (y.columns == 0) return;
  sum_dimensions<<<blocks_for(y.columns, kWarp), kThreads, 0, stream_of(execution)>>>(y, reconstruction, mean.data,
                                                                                      spread.data, pivot.data, sums);
  require_launch("accumulate_dimensions");
}

void accumulate_firing(const Execution& execution, const FeatureHits& hits, Array<std::int64_t> fired) {
  if (fired.size == 0) return;
  add_firing<<<blocks_for(fired.size, kThreads), kThreads, 0, stream_of(execution)>>>(hits.offsets.data, fired.size,
                                                                                      fired.data);
  require_launch("accumulate_firing");
}

void advance_clocks(const Execution& execution, const FeatureHits& hits, std::int64_t tokens, const AdamStep* step,
                    Array<std::int64_t> tokens_since) {
  if (tokens_since.size == 0) return;
  move_clocks<<<blocks_for(tokens_since.size, kThreads), kThreads, 0, stream_of(execution)>>>(
      hits.offsets.data, tokens_since.size, tokens, step, tokens_since.data);
  require_launch("advance_clocks");
}

}  // namespace weft::kernels::cuda
