// SPDX-License-Identifier: Apache-2.0
//
// Loss and gradient rows from partial reconstructions, in normalised space.
//
//   y^ = bias + sum over ranks r (in rank order, fp32) of partial[r]         e = y^ - y
//   loss_t = gradient_factor/2 * sum over tokens and dimensions of e^2        g = gradient_factor * e
//
// With gradient_factor = loss_factor this is the sum over layers of the mean over tokens and dimensions. With a weight
// w[j] per column:
//
//   loss_t = gradient_factor/2 * sum over tokens and dimensions of w e^2      g = gradient_factor * w * e
//
// w = 1 / scale^2 is the error in raw space; w = N d / V_t, V_t the sum of the squared deviations of the batch's
// targets of layer t from their mean, gives with loss_factor the fraction of variance unexplained (clt-training).
#pragma once

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

/// 2 / (N * d): the derivative of the mean squared error by a residual, per unit of residual.
constexpr double loss_factor(std::int64_t n_tokens, std::int64_t d_model) {
  return 2.0 / (static_cast<double>(n_tokens) * static_cast<double>(d_model));
}

/// Sums over a batch that give the training metrics; all [n_layers], fp64, of this rank's own tokens.
struct LossSums {
  Array<double> squared_error;                ///< sum of e^2: the loss is built from it
  Array<double> standardised_squared_error;   ///< sum of (e * standardise)^2
  Array<double> standardised_squared_target;  ///< sum of ((y - centre) * standardise)^2
};

constexpr int kLossSums = 3;  ///< number of sums in LossSums
/// Tokens that are summed together. Fixed: the order of the sums depends on n_tokens alone.
constexpr int kTokensPerLossSum = 8;

constexpr std::int64_t loss_blocks(std::int64_t n_tokens) {
  return (n_tokens + kTokensPerLossSum - 1) / kTokensPerLossSum;
}

/// Bytes of workspace of residual_and_loss: partial sums [loss_blocks, n_layers, kLossSums] in fp64.
constexpr std::int64_t loss_workspace(std::int64_t n_tokens, std::int64_t n_layers) {
  return loss_blocks(n_tokens) * n_layers * kLossSums * static_cast<std::int64_t>(sizeof(double));
}

/// partial: n_parts matrices [n, L * d] one after the other (part p starts at row p * n of `partial`); target [n, L *
/// d] raw normalised targets; bias [L * d]; centre and standardise [L * d] turn normalised targets into standardised
/// ones. Overwrites gradient_rows [n, L * d] and `sums`. Deterministic: the order of every sum depends on n alone.
WEFT_KERNEL(residual_and_loss,
            void(const Execution&, AnyMatrix partial, std::int64_t n_parts, AnyMatrix target, Array<const float> bias,
                 Array<const float> centre, Array<const float> standardise, std::int64_t n_layers,
                 float gradient_factor, AnyMatrix gradient_rows, LossSums sums, Array<std::byte> workspace));

/// residual_and_loss with weights w [L * d]; squared_error is the sum of w e^2.
void weighted_residual_and_loss(const Execution&, AnyMatrix partial, std::int64_t n_parts, AnyMatrix target,
                                Array<const float> bias, Array<const float> centre, Array<const float> standardise,
                                Array<const float> weight, std::int64_t n_layers, float gradient_factor,
                                AnyMatrix gradient_rows, LossSums sums, Array<std::byte> workspace);

/// weight[j] = spread[j]^2.
void square(const Execution&, Array<const float> spread, Array<float> weight);

/// Sums for the variance of this rank's targets, with v = target - centre, centre [L * d]: out[j] = sum over tokens of
/// v, out[L * d + j] = sum of v^2; fp64, tokens in order.
void target_moments(const Execution&, AnyMatrix target, Array<const float> centre, Array<double> out);

/// weight[j] = n_tokens d / V_t from the sums of target_moments of n_parts ranks, one after the other, added in this
/// order; 0 where V_t is no more than the rounding error of the sums. n_tokens: tokens of the batch.
void unexplained_weights(const Execution&, Array<const double> moments, std::int64_t n_parts, std::int64_t n_tokens,
                         std::int64_t d_model, Array<float> weight);

/// out[j] = sum over rows of matrix[i, j], fp32 in a fixed order: the gradient of the decoder bias.
WEFT_KERNEL(column_sums, void(const Execution&, AnyMatrix matrix, Array<float> out));

}  // namespace weft::kernels
