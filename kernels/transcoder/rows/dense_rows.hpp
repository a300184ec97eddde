// SPDX-License-Identifier: Apache-2.0
//
// Activations and their gradients as dense rows [tokens, features], fp32, for steps that form the gradient of each
// example (private training). The other kernels of transcoders work on lists of active features (sparse/).
//
// Rows are independent: the result for a token does not depend on other tokens.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/transcoder/activation/jump_relu.hpp"

namespace weft::kernels {

/// z[n, f] += bias[f].
void add_to_rows(const Execution&, Array<const float> bias, Matrix<float> z);

/// Keeps the k largest positive values of each row, among equal values those with the lowest f; sets the others to 0.
/// This is the rule "topk" of select/selection_rule.hpp. k >= 1. A NaN is not positive.
void keep_largest(const Execution&, std::int64_t k, Matrix<float> z);

/// Overwrites a: z where z > cut[f], else 0. cut >= 0; without data: 0. `a` may be `z`.
void keep_above(const Execution&, Matrix<const float> z, Array<const float> cut, Matrix<float> a);

/// gradient = 0 wherever the activation is 0: dloss/da -> dloss/dz.
void mask_inactive(const Execution&, Matrix<const float> activations, Matrix<float> gradient);

/// Backward pass of JumpReLU: replaces alpha = dloss/da by dloss/dz and sets theta_gradient[n, f] to the contribution
/// of token n to the gradient of the trained parameter (activation/jump_relu.hpp).
void jump_rows(const Execution&, const JumpRule&, Matrix<const float> z, Array<const float> theta, Matrix<float> alpha,
               Matrix<float> theta_gradient);

}  // namespace weft::kernels
