// SPDX-License-Identifier: Apache-2.0
//
// A decoder bias per pair of layers (crosslayer-coding, CLT-Forge): the reconstruction of layer t has t + 1 biases, of
// the source layers 0..t. All have the same gradient and the same initial value, so they remain equal, and only their
// sum B_t is stored:
//
//   B_t += (t + 1) (update of Adam from the gradient of one)        squared norm of the gradient: (t + 1) |g_t|^2
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// Extends an update in place: after[j] = before[j] + (t + 1) (after[j] - before[j]) with t = j / d_model. [L * d]
void extend_update(const Execution&, Array<const float> before, std::int64_t d_model, Array<float> after);

/// out[j] = sqrt(t + 1) gradient[j]. [L * d]
void norm_of_pairs(const Execution&, Array<const float> gradient, std::int64_t d_model, Array<float> out);

}  // namespace weft::kernels
