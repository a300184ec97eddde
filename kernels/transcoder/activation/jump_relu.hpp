// SPDX-License-Identifier: Apache-2.0
//
// JumpReLU: a = z where z exceeds the feature's threshold theta, else 0 (arXiv 2407.14435). The loss is constant in
// theta almost everywhere; its gradient is a pseudo-derivative, a sum over all tokens whose z lies in a band of width
// `bandwidth` about theta:
//
//   d loss / d parameter[f] = sum over tokens n of factor(z[n,f], theta[f]) * alpha[n,f]      alpha = d loss / d a
//
// Published forms differ, and results under one are not those of another. e = bandwidth, D = z - theta:
//
// clang-format off
//   form               active          parameter   dz = alpha where   factor, within the band
//   anthropic          z > theta       ln theta    active             -theta/e            |D| <  e/2
//   crosslayer-coding  z >= theta      ln theta    active             -z/e * theta        |D| <= e/2
//   goreg              z > max(theta,0)  theta     z >= 0             -theta/e            -e/2 < D <= e/2
//   clt-forge          z > theta       ln theta    active             -theta/e * theta    |D| <  e/2
//   openmoss           z > theta       ln theta    active             -theta/e * theta    |D| <  e/2 and z > 0
//   saelens            z > theta       ln theta    active             -theta/e * theta    |D| <  e/2
// clang-format on
//
// Only positive z are active in any form (the selection supports no others); a threshold that is a logarithm is
// positive. Thresholds are held as theta, whatever the trained parameter is. ln theta changes by D means theta <- theta
// exp(D).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/transcoder/loss/penalty.hpp"

namespace weft::kernels {

enum class JumpForm { anthropic, crosslayer_coding, goreg, clt_forge, openmoss, saelens };

/// One form of the table above.
struct JumpRule {
  bool inclusive = false;      ///< z == theta is active
  bool logarithmic = true;     ///< the trained parameter is ln theta
  bool passes_below = false;   ///< dz = alpha on all z >= 0, not only where active
  bool follows_z = false;      ///< the factor contains z in place of theta
  bool chained = false;        ///< the factor contains d theta / d ln theta once more
  bool closed_below = false;   ///< D == -bandwidth/2 is in the band
  bool closed_above = false;   ///< D == +bandwidth/2 is in the band
  bool positive_only = false;  ///< z <= 0 is not in the band
  float bandwidth = 1;
};

constexpr JumpRule jump_rule(JumpForm form, float bandwidth) {
  JumpRule rule;
  rule.bandwidth = bandwidth;
  switch (form) {
    case JumpForm::anthropic:
      break;
    case JumpForm::crosslayer_coding:
      rule.inclusive = rule.follows_z = rule.chained = rule.closed_below = rule.closed_above = true;
      break;
    case JumpForm::goreg:
      rule.passes_below = rule.closed_above = true;
      rule.logarithmic = false;
      break;
    case JumpForm::openmoss:
      rule.chained = rule.positive_only = true;
      break;
    case JumpForm::clt_forge:
    case JumpForm::saelens:
      rule.chained = true;
      break;
  }
  return rule;
}

/// The largest value that is not active, at least 0: z is active if and only if z > jump_bound. NaN if theta is.
WEFT_HOST_DEVICE inline float jump_bound(const JumpRule& rule, float theta) {
  if (theta <= 0.0f) return 0.0f;
  return rule.inclusive ? bits_float(float_bits(theta) - 1u) : theta;
}

WEFT_HOST_DEVICE inline bool jump_is_active(const JumpRule& rule, float z, float theta) {
  return z > jump_bound(rule, theta);
}

/// True if dz = alpha, false if dz = 0.
WEFT_HOST_DEVICE inline bool jump_passes_gradient(const JumpRule& rule, float z, float theta) {
  return rule.passes_below ? z >= 0.0f : jump_is_active(rule, z, theta);
}

/// The factor of alpha in the gradient of the trained parameter.
WEFT_HOST_DEVICE inline float jump_factor(const JumpRule& rule, float z, float theta) {
  const float distance = z - theta, half_width = 0.5f * rule.bandwidth;
  const bool above = rule.closed_below ? distance >= -half_width : distance > -half_width;
  const bool below = rule.closed_above ? distance <= half_width : distance < half_width;
  if (!above || !below || (rule.positive_only && !(z > 0.0f))) return 0.0f;
  const float slope = -(rule.follows_z ? z : theta) / rule.bandwidth;
  return rule.chained ? slope * theta : slope;
}

/// bounds[i] = jump_bound(theta[i]), the values with which the selection compares (select/).
void jump_bounds(const Execution&, const JumpRule&, Array<const float> theta, Array<float> bounds);

/// One tile of one layer: z = product + bias, and alpha, the gradient of the reconstruction's loss, to which the
/// penalty on activations is added.
struct JumpTile {
  AnyMatrix product;             ///< [tokens, features] fp32 or bf16
  Array<const float> bias;       ///< [features]
  Array<const float> theta;      ///< [features]
  Matrix<float> alpha;           ///< [tokens, features]
  bool replace_alpha = false;    ///< alpha <- dz, also of inactive entries
  Array<const float> norm = {};  ///< [features] norms of decoder rows; only with penalties
  Ramp bandwidth = {};           ///< bandwidth by step; replaces that of the rule if `step` is set
  const AdamStep* step = nullptr;
  SparsityPenalty sparsity = {};
  PreactivationPenalty preactivation = {};
};

/// Sums over the tokens of a tile, by feature. A sum without data is not formed.
struct JumpSums {
  Array<float> theta = {};  ///< gradient of the trained parameter
  Array<float> bias = {};   ///< dz
  Array<float> norm = {};   ///< gradient of the penalty on pre-activations by the norm of the decoder row ...
  Array<float> value = {};  ///< ... and the penalty itself
};

/// Bytes of workspace of jump_backward for tiles of at most n_tokens x n_features.
std::int64_t jump_backward_workspace(std::int64_t n_tokens, std::int64_t n_features);

/// Forms the sums of a tile, or adds them if `add` is set. Tokens are summed in blocks of kRowsPerSum (gradient/), then
/// the blocks: a fixed order, fp32.
void jump_backward(const Execution&, const JumpRule&, const JumpTile&, bool add, const JumpSums&,
                   Array<std::byte> workspace);

/// Adam on the trained parameter (ln theta or theta), without weight decay. No effect if the step is withheld.
void update_thresholds(const Execution&, const JumpRule&, const ParameterVector& theta, Array<const float> gradient,
                       const AdamStep* step);

/// out[i] += sum of squares of gradient_scale * row i of the gradient, in column order; step == nullptr: scale 1. Adds
/// nothing if the step is withheld.
void add_row_squares(const Execution&, Matrix<const float> gradient, const AdamStep* step, Array<double> out);

}  // namespace weft::kernels
