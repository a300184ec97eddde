// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in mlp_activation_portable.cpp and mlp_activation_cuda.cu.
#include "kernels/language/activation/mlp_activation.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::mlp_activation) mlp_activation;
decltype(kernels::mlp_activation_backward) mlp_activation_backward;
}  // namespace portable

namespace cuda {
decltype(kernels::mlp_activation) mlp_activation;
decltype(kernels::mlp_activation_backward) mlp_activation_backward;
}  // namespace cuda

void mlp_activation(const Execution& execution, MlpActivation activation, AnyMatrix x, AnyMatrix y) {
  dispatch<portable::mlp_activation, cuda::mlp_activation>(execution, activation, x, y);
}

void mlp_activation_backward(const Execution& execution, MlpActivation activation, AnyMatrix x, AnyMatrix dy,
                             AnyMatrix dx) {
  dispatch<portable::mlp_activation_backward, cuda::mlp_activation_backward>(execution, activation, x, dy, dx);
}

}  // namespace weft::kernels
