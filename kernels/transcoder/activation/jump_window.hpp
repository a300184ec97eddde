// SPDX-License-Identifier: Apache-2.0
//
// The gradient of jumprelu's thresholds (jump_relu.hpp) from lists: outside its window a pre-activation has no part in
// it, so the selection also lists what is in the window and not active. The backward pass of the decoder then gives
// alpha = d loss / d a of these entries with that of the active ones, and no product with the whole decoder is needed.
//
//   window list          every z above jump_window_cut: value z, active or not; also negative
//   the same, activated  value z where active, else 0: adds nothing to a reconstruction or to dW of decoders
//   jump_window_backward factor(z, theta) alpha, summed by feature; dz = alpha where active, else 0
//
// For forms whose dz is alpha where active only.
#pragma once

#include "kernels/dispatch.hpp"
#include "kernels/transcoder/activation/jump_relu.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// A rule whose bandwidth may change with the step.
struct JumpWindow {
  JumpRule rule;
  Ramp bandwidth = {};             ///< in place of the rule's, with `step`
  const AdamStep* step = nullptr;  ///< where kernels read the number of the step

  WEFT_HOST_DEVICE JumpRule now() const {
    JumpRule present = rule;
    if (step != nullptr) present.bandwidth = bandwidth.at(step->step);
    return present;
  }
};

/// A bound that every z exceeds that is active or in the window. It is lower than the border of the window by more than
/// the rounding of z - theta in jump_factor, which decides. NaN if theta is.
WEFT_HOST_DEVICE inline float jump_window_cut(const JumpRule& rule, float theta) {
  const float half_width = 0.5f * rule.bandwidth;
  const float rounding = 0x1p-22f * ((theta < 0.0f ? -theta : theta) + half_width);
  float border = theta - half_width - rounding;
  if (rule.positive_only && border < 0.0f) border = 0.0f;
  const float active = jump_cut(rule, theta);
  return border < active ? border : active;
}

/// cut[i] = jump_window_cut(theta[i]): what the selection compares with (select/).
void jump_window_cuts(const Execution&, const JumpWindow&, Array<const float> theta, Array<float> cut);

/// value[i] = activation of entry i of the window list. theta: [n_layers, n_features] of the list.
void jump_activations(const Execution&, const JumpRule&, const SparseActivations& window, Matrix<const float> theta,
                      Array<float> value);

/// What jump_window_backward overwrites, by key [n_layers * n_features].
struct JumpWindowSums {
  Array<float> theta;                  ///< gradient of the trained parameter
  Array<std::int64_t> active_offsets;  ///< [.. + 1] FeatureHits::offsets of active entries alone
};

/// activation_gradient, by position: alpha, becomes dz. Sums over the hits of a feature are fp64, in a fixed order.
void jump_window_backward(const Execution&, const JumpWindow&, const SparseActivations& window, const FeatureHits&,
                          Matrix<const float> theta, Array<float> activation_gradient, const JumpWindowSums&);

/// Of jump_window_backward, the pass over the hits: active[key] is the number of active entries, from which the offsets
/// follow.
WEFT_KERNEL(jump_window_sums, void(const Execution&, const JumpWindow&, const SparseActivations& window,
                                   const FeatureHits&, Matrix<const float> theta, Array<float> activation_gradient,
                                   Array<float> theta_gradient, Array<std::int64_t> active));

}  // namespace weft::kernels
