// SPDX-License-Identifier: Apache-2.0
//
// Loss and gradient rows of loss.hpp on NVIDIA GPUs. Workspace: loss_workspace.
#pragma once

#include "kernels/transcoder/loss/loss.hpp"

namespace weft::kernels::cuda {

void residual_and_loss(const Execution&, AnyMatrix partial, std::int64_t n_parts, AnyMatrix target,
                       Array<const float> bias, Array<const float> centre, Array<const float> standardise,
                       std::int64_t n_layers, float gradient_factor, AnyMatrix gradient_rows, LossSums sums,
                       Array<std::byte> workspace);

void column_sums(const Execution&, AnyMatrix matrix, Array<float> out);

}  // namespace weft::kernels::cuda
