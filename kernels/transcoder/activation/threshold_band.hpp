// SPDX-License-Identifier: Apache-2.0
//
// The gradient of jumprelu's thresholds (jump_relu.hpp) from lists. Only pre-activations in the band of width
// `bandwidth` about their threshold contribute to it, so the selection also lists inactive entries in the band. The
// backward pass of the decoder then gives alpha = d loss / d a of these entries together with the alpha of the active
// ones, and no product with the whole decoder is needed.
//
//   band list            every z above threshold_band_bound: value z, active or not; also negative
//   activated band list  value z where active, else 0: adds nothing to a reconstruction or to dW of decoders
//   threshold_band_backward factor(z, theta) alpha, summed by feature; dz = alpha where active, else 0
//
// Valid for forms whose dz is alpha where active only.
#pragma once

#include "kernels/dispatch.hpp"
#include "kernels/transcoder/activation/jump_relu.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// A JumpReLU rule whose bandwidth may change with the step.
struct ThresholdBand {
  JumpRule rule;
  Ramp bandwidth = {};             ///< bandwidth by step; replaces that of the rule if `step` is set
  const AdamStep* step = nullptr;  ///< where kernels read the number of the step

  WEFT_HOST_DEVICE JumpRule now() const {
    JumpRule present = rule;
    if (step != nullptr) present.bandwidth = bandwidth.at(step->step);
    return present;
  }
};

/// Lower bound that every active z and every z in the band exceeds. It is below the border of the band by more than
/// the rounding of z - theta in jump_factor, which decides. NaN if theta is.
WEFT_HOST_DEVICE inline float threshold_band_bound(const JumpRule& rule, float theta) {
  const float half_width = 0.5f * rule.bandwidth;
  const float rounding = 0x1p-22f * ((theta < 0.0f ? -theta : theta) + half_width);
  float border = theta - half_width - rounding;
  if (rule.positive_only && border < 0.0f) border = 0.0f;
  const float active = jump_bound(rule, theta);
  return border < active ? border : active;
}

/// bounds[i] = threshold_band_bound(theta[i]), the values with which the selection compares (select/).
void threshold_band_bounds(const Execution&, const ThresholdBand&, Array<const float> theta, Array<float> bounds);

/// value[i] = activation of entry i of the band list. theta: [n_layers, n_features] of the list.
void jump_activations(const Execution&, const JumpRule&, const SparseActivations& listed, Matrix<const float> theta,
                      Array<float> value);

/// Outputs of threshold_band_backward, by key [n_layers * n_features].
struct ThresholdBandSums {
  Array<float> theta;                  ///< gradient of the trained parameter
  Array<std::int64_t> active_offsets;  ///< [.. + 1] FeatureHits::offsets of active entries alone
};

/// Forms `sums` and turns activation_gradient (by position) from alpha into dz. Sums over the hits of a feature are
/// fp64, in a fixed order.
void threshold_band_backward(const Execution&, const ThresholdBand&, const SparseActivations& listed,
                             const FeatureHits&, Matrix<const float> theta, Array<float> activation_gradient,
                             const ThresholdBandSums&);

/// Pass of threshold_band_backward over the hits: active[key] is the number of active entries, from which the offsets
/// follow.
WEFT_KERNEL(threshold_band_sums, void(const Execution&, const ThresholdBand&, const SparseActivations& listed,
                                      const FeatureHits&, Matrix<const float> theta, Array<float> activation_gradient,
                                      Array<float> theta_gradient, Array<std::int64_t> active));

}  // namespace weft::kernels
