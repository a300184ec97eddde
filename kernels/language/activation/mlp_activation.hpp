// SPDX-License-Identifier: Apache-2.0
//
// Activations of the MLP of a transformer block, applied to every element of its pre-activations:
//
//   gelu        y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))   (Hendrycks & Gimpel 2016, the tanh form)
//   gelu_exact  y = x/2 (1 + erf(x / sqrt(2)))                      (the same, as BERT and GPT-NeoX have it)
//   relu2       y = max(x, 0)^2                                     (So et al. 2021)
//   swiglu      y = u g sigmoid(g)                                  (Shazeer 2020)
//   geglu       y = u gelu(g)
//
// The gated ones read twice as many columns as they write: [g | u].
#pragma once

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

enum class MlpActivation : int { gelu, swiglu, geglu, relu2, gelu_exact };

constexpr bool is_gated(MlpActivation activation) {
  return activation == MlpActivation::swiglu || activation == MlpActivation::geglu;
}

/// x [n, D], gated: [n, 2 D] = [g | u]; y [n, D]. fp32, bf16 or fp16, each on its own; arithmetic is fp32.
WEFT_KERNEL(mlp_activation, void(const Execution&, MlpActivation, AnyMatrix x, AnyMatrix y));

/// dx from x and dy, like x. dx may be x.
WEFT_KERNEL(mlp_activation_backward, void(const Execution&, MlpActivation, AnyMatrix x, AnyMatrix dy, AnyMatrix dx));

}  // namespace weft::kernels
