// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory, one pass over the entries in use.
#include "kernels/transcoder/activation/activation.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void differentiate(const ActivationFunction function, const std::int64_t* row_offsets, std::int64_t n_tokens,
                              const std::uint32_t* key, const float* value, const float* activation_gradient,
                              float* preactivation) {
  const std::int64_t total = row_offsets[n_tokens];  // only the device knows it
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step)
    preactivation[i] = preactivation_gradient(function, key[i], value[i], activation_gradient[i]);
}

}  // namespace

void activation_backward(const Execution& execution, const ActivationFunction& function,
                         const SparseActivations& activations, Array<const float> activation_gradient,
                         const ActivationGradients& gradients) {
  if (activations.key.size == 0) return;
  const unsigned blocks = blocks_for(activations.key.size, kThreads, multiprocessors() * 16);
  differentiate<<<blocks, kThreads, 0, stream_of(execution)>>>(
      function, activations.row_offsets.data, activations.n_tokens, activations.key.data, activations.value.data,
      activation_gradient.data, gradients.preactivation.data);
  require_launch("activation_backward");
}

}  // namespace weft::kernels::cuda
