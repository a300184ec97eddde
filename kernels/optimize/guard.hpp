// SPDX-License-Identifier: Apache-2.0
//
// Decisions about a step that are made in the memory of the kernels: whether it updates the parameters, and the factor
// by which its gradient is clipped. The host reads the outcome later from a ring in host memory, without
// synchronisation.
//
// Invariants. Nothing that is not finite reaches a parameter: a gradient row or input that is not finite withholds the
// whole step (AdamStep::withheld) before any update, and, unless such steps are to be skipped, every step after it. A
// fault of the model, such as a selection that is not valid, withholds this and every later step. So does an exchange
// between GPUs that was aborted (kernels/peers/peers_cuda.hpp): nothing after it uses the rows that did not arrive.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::kernels {

/// Why no later step updates anything: StepGuard::halted.
enum Halt : std::int64_t { kRuns = 0, kNotFinite = 1, kModelFault = 2, kExchangeAborted = 3 };

/// What a step found, in memory that kernels access; the same on all ranks when the guard decides.
struct StepFlags {
  std::int32_t not_finite;   ///< not 0: an input or gradient row is not finite
  std::int32_t model_fault;  ///< not 0: the step is not valid; the model can state the reason
};

/// State of the guard over a run, in memory that kernels access.
struct StepGuard {
  std::int64_t skipped;  ///< steps without an update, since the start of the run
  std::int64_t halted;   ///< Halt
};

/// Outcome of a step; in page-locked host memory.
struct StepOutcome {
  std::int64_t withheld;  ///< not 0: this step updated nothing
  std::int64_t halted;    ///< Halt
  std::int64_t skipped;
  std::int64_t overflow;  ///< not 0: withheld because the scaled loss overflowed (loss_scale.hpp)
  double loss_scale;      ///< scale of this step; 0: the loss is not scaled
};

struct LossScale;

/// Number of steps whose outcomes are kept: that of step t at index t % kOutcomes.
constexpr std::int64_t kOutcomes = 4;

/// step->withheld and outcomes[step->step % kOutcomes] from *flags. skip_at_most: number of steps of a run that may be
/// skipped because they are not finite; one more halts it. An overflow of the scaled loss withholds its step and counts
/// as neither.
void guard_step(const Execution&, const StepFlags* flags, std::int64_t skip_at_most, StepGuard* guard, AdamStep* step,
                StepOutcome* outcomes, const LossScale* scale = nullptr);

/// *flag |= 1 if a value is above `largest`, or not a number.
void flag_above(const Execution&, Array<const double> values, double largest, std::int32_t* flag);

/// *squared = *rows / (rows_are_scaled ? gradient_scale^2 : 1) + *bias: the squared norm of the gradient before
/// clipping, of this rank's parameters. No effect if the step is withheld.
void join_norms(const Execution&, const double* rows, bool rows_are_scaled, const double* bias, const AdamStep* step,
                double* squared);

/// *norm = sqrt(*squared). No effect if the step is withheld.
void keep_norm(const Execution&, const double* squared, const AdamStep* step, double* norm);

/// step->gradient_scale = bound / *norm if the norm exceeds the bound, else 1.
void clip_to_norm(const Execution&, const double* norm, double bound, AdamStep* step);

}  // namespace weft::kernels
