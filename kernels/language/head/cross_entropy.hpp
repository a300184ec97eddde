// SPDX-License-Identifier: Apache-2.0
//
// Softmax cross-entropy of rows of logits, and its gradient in their place:
//
//   lse = max + log sum exp(z - max)     loss = lse - z_y     dz = weight * scale * (softmax(z) - 1_y)
//
// Columns from `vocabulary` on are padding: the softmax excludes them and their gradient is 0. With softcap c,
// z = c tanh(a / c) of the stored a, and da = dz (1 - (z / c)^2). With temperature t, z is divided by it after the cap:
// the distribution from which kernels/language/sample/ draws. z_loss adds z_loss * lse^2 to the loss.
//
// A vocabulary divided over ranks: each forms the SoftmaxPart of its columns, and with those of all ranks the loss and
// the gradient of its columns. The logits of a row are never in one place (Shoeybi et al. 2019, section 3).
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

/// A target that is not counted: loss 0, gradient 0.
inline constexpr std::int32_t kIgnored = -1;

/// Contribution of the columns of one rank to the softmax of a row.
struct SoftmaxPart {
  float largest = 0;       ///< of its logits
  float sum = 0;           ///< of exp(z - largest)
  float target_logit = 0;  ///< 0 if the target is not among its columns
};

struct CrossEntropy {
  std::int64_t vocabulary = 0;  ///< columns without padding
  float softcap = 0;            ///< 0: none
  float z_loss = 0;
  const float* scale = nullptr;     ///< [1] where the kernels run: 1 / counted targets of the step, times a loss scale
  Array<const float> weights = {};  ///< [rows] per token, or empty: 1
  float temperature = 1;            ///< more than 0
  std::int64_t first_token = 0;     ///< token of column 0
  Array<const SoftmaxPart> parts = {};  ///< [ranks, rows] in rank order; empty: this rank has all of the vocabulary
};

/// parts [n]: of these logits. Those of ignored targets are 0.
WEFT_KERNEL(softmax_parts, void(const Execution&, const CrossEntropy&, AnyMatrix logits,
                                Array<const std::int32_t> targets, Array<SoftmaxPart> parts));

/// logits [n, at least vocabulary] fp32, bf16 or fp16 become their gradient if `gradient`, else stay. losses [n]: fp32,
/// not scaled by `scale` or `weights`. Targets in [0, vocabulary) or kIgnored: the caller checks them.
WEFT_KERNEL(cross_entropy, void(const Execution&, const CrossEntropy&, AnyMatrix logits,
                                Array<const std::int32_t> targets, Array<float> losses, bool gradient));

}  // namespace weft::kernels
