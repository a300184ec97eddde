// SPDX-License-Identifier: Apache-2.0
//
// Penalties on activations and pre-activations, weighted by the norms of decoder rows:
//
//   P = sum over tokens and features of p(c a nu)          nu[f] = norm of the decoder row of f, all its targets
//                                                          p(v) = tanh(v)  or  v: the L1 norm weighted by the decoder
//   Q = sum over tokens and features of q(z)               q = relu(theta - z) nu  or  relu(-z)
//
//   dP/da = c nu p'                dP/dnu = sum over tokens of c a p'      also at a = 0; p' = 1 - tanh^2  or  1
//   q = relu(theta - z) nu:        dz: -nu, dtheta: +nu where z < theta              dnu: sum of relu(theta - z)
//   q = relu(-z):                  dz: -1 where z < 0
//
// The gradient by nu reaches the decoder: dW += (d/dnu) W / nu, and nothing where nu = 0.
//
// Sources: P and the first q, transformer-circuits.pub/2025/january-update; the second q, crosslayer-coding.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// A coefficient by step: `from` up to step `begin`, `value` from step `end` on, linear between. Steps count from 1.
struct Ramp {
  float value = 0;
  double begin = 0, end = 0;
  float from = 0;

  WEFT_HOST_DEVICE float at(std::uint64_t step) const {
    const double t = static_cast<double>(step);
    if (t >= end) return value;
    return t <= begin ? from : static_cast<float>(from + (value - from) * ((t - begin) / (end - begin)));
  }
};

enum class SparsityForm { tanh, linear };

/// The term coefficient * P of the loss. `coefficient` contains the reduction over tokens.
struct SparsityPenalty {
  SparsityForm form = SparsityForm::tanh;
  float scale = 0;  ///< c
  Ramp coefficient;
  const AdamStep* step = nullptr;  ///< where kernels read the number of the step

  bool active() const { return coefficient.value > 0; }
  /// Coefficient of the present step.
  WEFT_HOST_DEVICE float present() const { return coefficient.at(step->step); }
  WEFT_HOST_DEVICE float value(float activation, float norm) const {
    const float v = scale * activation * norm;
    return form == SparsityForm::linear ? v : tanhf(v);
  }
  /// c p'. Times nu it is the gradient with respect to a, times a that with respect to nu.
  WEFT_HOST_DEVICE float slope(float activation, float norm) const {
    if (activation == 0.0f || form == SparsityForm::linear) return scale;
    const float t = value(activation, norm);
    return scale * (1.0f - t * t);
  }
};

enum class PreactivationForm { below_threshold, negative };

/// The term coefficient * Q of the loss. `coefficient` contains the reduction over tokens.
struct PreactivationPenalty {
  PreactivationForm form = PreactivationForm::below_threshold;
  float coefficient = 0;

  bool active() const { return coefficient > 0; }
};

/// Forms, by key [L * F], norm_gradient = d (coefficient * P) / d nu and value = coefficient * P. Hits in a fixed
/// order.
WEFT_KERNEL(sparsity_sums, void(const Execution&, const SparsityPenalty&, const SparseActivations&, const FeatureHits&,
                                Array<const float> norm, Array<float> norm_gradient, Array<double> value));

/// Adds the gradient of coefficient * P to da of every entry in use, by position as `activation_gradient` of decode/.
void add_sparsity_gradient(const Execution&, const SparsityPenalty&, const SparseActivations&, Array<const float> norm,
                           Array<float> activation_gradient);

/// Forms the factors of decoder rows in their gradient: first[i] = (first[i] + second[i]) / norm[i], 0 where the norm
/// is 0. `second` without data counts as 0.
void decoder_row_factors(const Execution&, Array<float> first, Array<const float> second, Array<const float> norm);

}  // namespace weft::kernels
