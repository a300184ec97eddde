// SPDX-License-Identifier: Apache-2.0
//
// Decisions about a step that are made in the memory of the kernels: whether it updates the parameters, and the factor
// by which its gradient is clipped. The host reads the outcome later from a ring in host memory, without
// synchronisation.
//
// Invariant. Nothing that is not finite reaches a parameter: a gradient row or input that is not finite withholds the
// whole step (AdamStep::withheld) before any update, and, unless such steps are to be skipped, every step after it.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/parameters.hpp"

namespace weft::kernels {

/// State of the guard over a run, in memory that kernels access.
struct StepGuard {
  std::int64_t skipped;  ///< steps without an update, since the start of the run
  std::int64_t halted;   ///< not 0: no later step updates anything
};

/// Outcome of a step; in page-locked host memory.
struct StepOutcome {
  std::int64_t
      withheld;  ///< not 0: gradients or inputs of this step were not finite, or an earlier step halted the run
  std::int64_t halted;
  std::int64_t skipped;
};

/// Number of steps whose outcomes are kept: that of step t at index t % kOutcomes.
constexpr std::int64_t kOutcomes = 4;

/// step->withheld and outcomes[step->step % kOutcomes] from *not_finite. skip_at_most: number of steps of a run
/// that may be skipped; one more halts it.
void guard_step(const Execution&, const std::int32_t* not_finite, std::int64_t skip_at_most, StepGuard* guard,
                AdamStep* step, StepOutcome* outcomes);

/// *squared = *rows / (rows_are_scaled ? gradient_scale^2 : 1) + *bias: the squared norm of the gradient before
/// clipping, of this rank's parameters. No effect if the step is withheld.
void join_norms(const Execution&, const double* rows, bool rows_are_scaled, const double* bias, const AdamStep* step,
                double* squared);

/// *norm = sqrt(*squared). No effect if the step is withheld.
void keep_norm(const Execution&, const double* squared, const AdamStep* step, double* norm);

/// step->gradient_scale = bound / *norm if the norm exceeds the bound, else 1.
void clip_to_norm(const Execution&, const double* norm, double bound, AdamStep* step);

}  // namespace weft::kernels
