// SPDX-License-Identifier: Apache-2.0
//
// Dynamic loss scaling for fp16 gradients, which underflow below 6e-8 (Micikevicius et al., arXiv 1710.03740; constants
// of PyTorch's GradScaler, hysteresis of Megatron-LM). The loss is multiplied by a scale S before the backward pass:
//
//   after 2000 steps without overflow           S doubles, up to 2^32
//   at an overflow (a gradient is not finite)   the step is withheld; S halves at the second one since S last doubled,
//                                               and at each one after it
//
// An overflow withholds exactly one update, on all ranks if their flags are reduced. Adam's t does not advance. An
// overflow at S = 1 does not come from the scale: the guard treats it like any step that is not finite.
//
// One step:
//
//   scale_loss         the factor of the loss gradient, before the backward pass
//   guard_step         (guard.hpp) withholds the step at an overflow
//   unscale_and_clip   the norm of the gradient without S, and the factor for the update
//   update_loss_scale  S of the next step, after the update
#pragma once

#include <cstdint>

#include "kernels/execution.hpp"
#include "kernels/optimize/guard.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::kernels {

/// State of the scale over a run, in memory that kernels access; all in fp64, so that a checkpoint stores it as one
/// tensor.
struct LossScale {
  double scale = 65536;
  double clean = 0;       ///< steps without overflow since the last change or overflow
  double hysteresis = 2;  ///< overflows until the scale halves
  double overflows = 0;   ///< since the start of the run
};
inline constexpr std::int64_t kLossScaleNumbers = sizeof(LossScale) / sizeof(double);

/// True for a step that is not finite because of its scale, as far as can be known.
WEFT_HOST_DEVICE inline bool is_overflow(const StepFlags& flags, const LossScale* scale) {
  return flags.not_finite != 0 && scale != nullptr && scale->scale > 1;
}

/// *factor *= S.
void scale_loss(const Execution&, const LossScale* scale, float* factor);

/// *norm = sqrt(*squared) / S and step->gradient_scale = min(1, bound / *norm) / S; bound 0: no clipping. Adam's
/// corrections are replaced by those of t = step - overflows. Without `scale` S = 1. No effect if the step is withheld.
void unscale_and_clip(const Execution&, const double* squared, double bound, const LossScale* scale, double* norm,
                      AdamStep* step);

/// The scale of the next step. flags: those that the guard decided upon.
void update_loss_scale(const Execution&, const StepFlags* flags, LossScale* scale);

}  // namespace weft::kernels
