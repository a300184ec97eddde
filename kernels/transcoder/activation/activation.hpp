// SPDX-License-Identifier: Apache-2.0
//
// The activation functions of a transcoder. The value of an active entry is its pre-activation, a = z, and da is dz on
// the sparse lists; gradients outside the lists (thresholds of jumprelu) are in jump_relu.hpp.
#pragma once

namespace weft::kernels {

enum class Activation { batch_topk, topk, relu, jumprelu };

/// True if a fixed number of features (k) is kept; false if every feature above a bound is kept.
constexpr bool activation_keeps_k(Activation kind) {
  return kind == Activation::batch_topk || kind == Activation::topk;
}

/// True if the bound is a learned threshold of each feature, false if it is 0 or a number of features is kept.
constexpr bool activation_has_thresholds(Activation kind) { return kind == Activation::jumprelu; }

}  // namespace weft::kernels
