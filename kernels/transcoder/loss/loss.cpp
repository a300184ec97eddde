// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in loss_portable.cpp and loss_cuda.cu.
#include "kernels/transcoder/loss/loss.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::residual_and_loss) residual_and_loss;
decltype(kernels::column_sums) column_sums;
}  // namespace portable

namespace cuda {
decltype(kernels::residual_and_loss) residual_and_loss;
decltype(kernels::column_sums) column_sums;
}  // namespace cuda

void residual_and_loss(const Execution& execution, AnyMatrix partial, std::int64_t n_parts, AnyMatrix target,
                       Array<const float> bias, Array<const float> centre, Array<const float> standardise,
                       std::int64_t n_layers, float gradient_factor, AnyMatrix gradient_rows, LossSums sums,
                       Array<std::byte> workspace) {
  dispatch<portable::residual_and_loss, cuda::residual_and_loss>(execution, partial, n_parts, target, bias, centre,
                                                                 standardise, n_layers, gradient_factor, gradient_rows,
                                                                 sums, workspace);
}

void column_sums(const Execution& execution, AnyMatrix matrix, Array<float> out) {
  dispatch<portable::column_sums, cuda::column_sums>(execution, matrix, out);
}

}  // namespace weft::kernels
