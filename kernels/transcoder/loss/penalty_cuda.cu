// SPDX-License-Identifier: Apache-2.0
#include "kernels/transcoder/loss/penalty.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

/// One warp per key: most have few hits, so the limit is the latency of offsets -> positions -> values, which many
/// warps hide.
__global__ void sum_hits(const __grid_constant__ SparsityPenalty penalty, std::int64_t n_keys,
                         const std::int64_t* offsets, const std::uint32_t* position, const float* activation,
                         const float* norm, float* norm_gradient, double* value) {
  const std::int64_t key = blockIdx.x * static_cast<std::int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (key >= n_keys) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const float nu = norm[key];
  double slopes = 0.0, values = 0.0;
  for (std::int64_t i = offsets[key] + lane; i < offsets[key + 1]; i += kWarp) {
    const float a = activation[position[i]];
    slopes += static_cast<double>(a * penalty.slope(a, nu));
    values += static_cast<double>(penalty.value(a, nu));
  }
  slopes = warp_sum(slopes);
  values = warp_sum(values);
  if (lane != 0) return;
  const double coefficient = static_cast<double>(penalty.present());
  norm_gradient[key] = static_cast<float>(coefficient * slopes);
  value[key] = coefficient * values;
}

}  // namespace

void sparsity_sums(const Execution& execution, const SparsityPenalty& penalty, const SparseActivations& activations,
                   const FeatureHits& hits, Array<const float> norm, Array<float> norm_gradient, Array<double> value) {
  if (norm.size == 0) return;
  sum_hits<<<blocks_for(norm.size, 8), 256, 0, stream_of(execution)>>>(penalty, norm.size, hits.offsets.data,
                                                                       hits.position.data, activations.value.data,
                                                                       norm.data, norm_gradient.data, value.data);
  require_launch("sparsity_sums");
}

}  // namespace weft::kernels::cuda
