// SPDX-License-Identifier: Apache-2.0
//
// Encoder biases from data: each feature is active on a given number of tokens of the first batch.
//
//   b[f] = cut - v[f]      v[f]: midpoint of the active-th and the next largest z[n, f] over tokens n, without bias
//
// Source: transformer-circuits.pub/2025/january-update; CLT-Forge.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// Overwrites bias[f] as above, with one cut for all. z [n_tokens, features] fp32; 0 <= active < n_tokens. Values that
/// are not finite count as the smallest; bias[f] = 0 where that leaves none.
void bias_of_quantile(const Execution&, Matrix<const float> z, std::int64_t active, float cut, Array<float> bias);

}  // namespace weft::kernels
