// SPDX-License-Identifier: Apache-2.0
//
// The activations of one element and their derivatives, for portable and CUDA kernels.
#pragma once

#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/exponential.hpp"

namespace weft::kernels {

// (1 + tanh(v)) / 2 = sigmoid(2 v): gelu(x) = x sigmoid(x (kGeluLinear + kGeluCubic x^2)).
constexpr float kGeluLinear = 1.5957691216f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f * 1.5957691216f;

struct ValueAndSlope {
  float value, slope;
};

template <MlpActivation kind>
WEFT_HOST_DEVICE inline ValueAndSlope with_slope(float x) {
  if constexpr (kind == MlpActivation::relu2) {
    const float positive = x > 0.0f ? x : 0.0f;
    return {positive * positive, 2.0f * positive};
  } else if constexpr (kind == MlpActivation::swiglu) {
    const float s = sigmoid(x);
    return {x * s, s * (1.0f + x * (1.0f - s))};
  } else if constexpr (kind == MlpActivation::gelu_exact) {
    constexpr float kRootHalf = 0.70710678f, kDensity = 0.39894228f;  // 1 / sqrt(2), 1 / sqrt(2 pi)
    const float share = 0.5f * erfcf(-kRootHalf * x);                 // of the normal distribution below x
    return {x * share, share + x * kDensity * exponential(-0.5f * x * x)};
  } else {
    const float square = x * x;
    const float s = sigmoid(x * (kGeluLinear + kGeluCubic * square));
    return {x * s, s + x * s * (1.0f - s) * (kGeluLinear + 3.0f * kGeluCubic * square)};
  }
}

/// Value of the activation: y from x without a gate; with a gate the factor of u, y / u from g.
template <MlpActivation kind>
WEFT_HOST_DEVICE inline float activated(float x) {
  return with_slope<kind>(x).value;
}

}  // namespace weft::kernels
