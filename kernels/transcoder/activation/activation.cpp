// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in activation_portable.cpp and activation_cuda.cu.
#include "kernels/transcoder/activation/activation.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::activation_backward) activation_backward;
}  // namespace portable

namespace cuda {
decltype(kernels::activation_backward) activation_backward;
}  // namespace cuda

void activation_backward(const Execution& execution, const ActivationFunction& function,
                         const SparseActivations& activations, Array<const float> activation_gradient,
                         const ActivationGradients& gradients) {
  if (activation_passes_gradient(function.kind) && gradients.preactivation.data == activation_gradient.data) return;
  dispatch<portable::activation_backward, cuda::activation_backward>(execution, function, activations,
                                                                     activation_gradient, gradients);
}

}  // namespace weft::kernels
