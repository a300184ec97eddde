// SPDX-License-Identifier: Apache-2.0
//
// What happens to the gradient of a parameter row in the kernels that form it:
//
//   dW  ->  + extra gradient  ->  + noise  ->  clip (AdamStep::gradient_scale)  ->  update of w, m, v
//
// The fused backward kernels of encode/ and decode/ hold dW in registers or cache and never store it, so whatever acts
// on it runs inside them. Each is written once for any RowEpilogue, on both backends; RowEpilogue<> is plain Adam and
// adds no instruction. To add a penalty on the weights write an ExtraGradient, to add an optimizer write a Rule, and
// instantiate `backward` of encode/ or decode/ with it.
#pragma once

#include "kernels/array.hpp"
#include "kernels/optimize/adam_rule.hpp"
#include "kernels/privacy/row_noise.hpp"

namespace weft::kernels {

/// No gradient besides that of the loss. Another ExtraGradient sets kPresent, so that rows without hits are not
/// skipped, and returns the element to add before clipping, from `of_row` = row(key) and the weight before the update
/// as the kernels read it (of two planes the bf16 one). key = layer * n_features + row. Kernels call `row` well before
/// its value is needed. Its members are kernel arguments.
struct NoExtraGradient {
  static constexpr bool kPresent = false;
  WEFT_HOST_DEVICE float row(std::int64_t /*key*/) const { return 0.0f; }
  WEFT_HOST_DEVICE float operator()(float /*of_row*/, float /*weight*/) const { return 0.0f; }
};

/// Adam with decoupled weight decay. A rule clips the gradient and replaces one element's w, m and v; for the
/// vectorised CUDA kernels it also overloads `update8` (adam_cuda.cuh).
struct AdamRule {
  WEFT_HOST_DEVICE void operator()(const AdamStep& step, float gradient, float& weight, float& first_moment,
                                   float& second_moment) const {
    adam_rule(step, step.weight_decay, gradient, weight, first_moment, second_moment);
  }
};

/// Noise: NoRowNoise or RowNoise; rows without hits have it too.
template <class ExtraGradient = NoExtraGradient, class Rule = AdamRule, class Noise = NoRowNoise>
struct RowEpilogue {
  static constexpr bool kHasExtra = ExtraGradient::kPresent, kHasNoise = Noise::kPresent;
  ExtraGradient extra{};
  Rule rule{};
  Noise noise{};
};
/// Epilogue of a private step.
using NoisyEpilogue = RowEpilogue<NoExtraGradient, AdamRule, RowNoise>;

}  // namespace weft::kernels
