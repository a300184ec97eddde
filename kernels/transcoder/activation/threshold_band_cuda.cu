// SPDX-License-Identifier: Apache-2.0
//
// One warp per feature, lanes over its hits. Limit: the latency of three dependent loads (offsets, position, value and
// gradient); most features have fewer hits than a warp has lanes.
#include "kernels/transcoder/activation/threshold_band.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    sum_band(ThresholdBand band, const float* value, const std::int64_t* offsets, const std::uint32_t* position,
             Matrix<const float> thresholds, std::int64_t n_features, std::int64_t n_keys, float* gradient,
             float* theta_gradient, std::int64_t* active) {
  const std::int64_t key = blockIdx.x * static_cast<std::int64_t>(kThreads / kWarp) + threadIdx.x / kWarp;
  if (key >= n_keys) return;  // uniform over the warp
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int64_t begin = offsets[key], end = offsets[key + 1];
  double sum = 0;
  int count = 0;
  if (begin < end) {
    const JumpRule rule = band.now();
    const float theta = thresholds(key / n_features, key % n_features);
    for (std::int64_t i = begin + lane; i < end; i += kWarp) {
      const std::uint32_t at = position[i];
      const float z = value[at], alpha = gradient[at];
      sum += static_cast<double>(jump_factor(rule, z, theta)) * static_cast<double>(alpha);
      if (jump_is_active(rule, z, theta))
        ++count;
      else
        gradient[at] = 0.0f;
    }
  }
  sum = warp_sum(sum);
  count = warp_sum(count);
  if (lane != 0) return;
  theta_gradient[key] = static_cast<float>(sum);
  active[key] = count;
}

}  // namespace

void threshold_band_sums(const Execution& execution, const ThresholdBand& of_step, const SparseActivations& listed,
                         const FeatureHits& hits, Matrix<const float> theta, Array<float> activation_gradient,
                         Array<float> theta_gradient, Array<std::int64_t> active) {
  if (active.size == 0) return;
  sum_band<<<blocks_for(active.size, kThreads / kWarp), kThreads, 0, stream_of(execution)>>>(
      of_step, listed.value.data, hits.offsets.data, hits.position.data, theta, listed.n_features, active.size,
      activation_gradient.data, theta_gradient.data, active.data);
  require_launch("threshold_band_sums");
}

}  // namespace weft::kernels::cuda
