// SPDX-License-Identifier: Apache-2.0
//
// Resampling of dead features (Bricken et al. 2023, "Towards Monosemanticity", for a cross-layer decoder): a dead
// feature is directed at a token whose reconstruction is poor.
//
//   q[n]     = |strip of the gradient row of token n that the feature's decoder row multiplies|^2
//   P(n)     = q[n] / sum of q                                one draw per dead feature, keyed by its global index
//   W_enc[f] = encoder_norm x~_n / |x~_n|     W_dec[f] = -decoder_norm g_n / |g_n|
//   bias, moments and clock are 0, the threshold its initial value
//
// A token whose gradient row is not finite is never drawn.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::kernels {

/// sums[n] = q[0] + ... + q[n] of `rows` [n_tokens, columns] (fp32 or bf16), fp64 in token order.
void sums_of_squares(const Execution&, AnyMatrix rows, Array<double> sums);

/// token[f] = the token drawn for feature f, or -1 if clocks[f] < window or if all sums are 0. `first_key`: global
/// index of feature 0 over all layers.
void draw_tokens(const Execution&, Array<const std::int64_t> clocks, std::int64_t window, Array<const double> sums,
                 std::uint64_t seed, std::uint64_t step, std::int64_t first_key, Array<std::int64_t> token);

/// rows[i] = factor v / |v|, v row token[i] of `source`, where token[i] is not -1 and |v| is finite and not 0. rows
/// [token.size, source.columns] fp32.
void direct_rows(const Execution&, Array<const std::int64_t> token, AnyMatrix source, float factor, Matrix<float> rows);

/// Both moments of the rows with a token become 0. token: by row of `parameters`.
void reset_moments(const Execution&, Array<const std::int64_t> token, const ParameterRows& parameters);

/// Elements with a token become `value`, with moments 0.
void reset_elements(const Execution&, Array<const std::int64_t> token, float value, const ParameterVector& parameters);

/// Clocks of features with a token become 0.
void reset_clocks(const Execution&, Array<const std::int64_t> token, Array<std::int64_t> clocks);

}  // namespace weft::kernels
