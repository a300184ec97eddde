// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in jump_window_portable.cpp and jump_window_cuda.cu.
#include "kernels/transcoder/activation/jump_window.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::jump_window_sums) jump_window_sums;
}  // namespace portable

namespace cuda {
decltype(kernels::jump_window_sums) jump_window_sums;
}  // namespace cuda

void jump_window_sums(const Execution& execution, const JumpWindow& of_step, const SparseActivations& window,
                      const FeatureHits& hits, Matrix<const float> theta, Array<float> activation_gradient,
                      Array<float> theta_gradient, Array<std::int64_t> active) {
  dispatch<portable::jump_window_sums, cuda::jump_window_sums>(execution, of_step, window, hits, theta,
                                                               activation_gradient, theta_gradient, active);
}

}  // namespace weft::kernels
