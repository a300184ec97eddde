// SPDX-License-Identifier: Apache-2.0
//
// Encoder biases from data: so many tokens of a batch activate each feature at first.
//
//   b[f] = cut - v[f]      v[f]: half way between the active-th and the next largest z[n, f] of the tokens n, without
//   bias
//
// Source: transformer-circuits.pub/2025/january-update; CLT-Forge.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// z [n_tokens, features] fp32; 0 <= active < n_tokens. bias[f] as above, with one cut for all. Values that are
/// not finite count as the smallest; bias[f] = 0 where that leaves none.
void bias_of_quantile(const Execution&, Matrix<const float> z, std::int64_t active, float cut, Array<float> bias);

}  // namespace weft::kernels
