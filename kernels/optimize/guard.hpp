// SPDX-License-Identifier: Apache-2.0
//
// What is decided about a step where its numbers are: whether it may update the parameters at all, and by what factor
// its gradient is clipped. The host learns of it later, from a ring in its own memory, and never has to wait.
//
// Invariant. Nothing that is not finite reaches a parameter: a gradient row or input that is not finite withholds the
// whole step (AdamStep::withheld) before any update, and, unless such steps are to be skipped, every step after it.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/parameters.hpp"

namespace weft::kernels {

/// What a run remembers of its withheld steps. In memory that the kernels can reach.
struct StepGuard {
  std::int64_t skipped;  ///< steps without an update, since the start of the run
  std::int64_t halted;   ///< not 0: no later step updates anything
};

/// What became of a step; in page-locked host memory.
struct StepOutcome {
  std::int64_t
      withheld;  ///< not 0: gradients or inputs of this step were not finite, or an earlier step halted the run
  std::int64_t halted;
  std::int64_t skipped;
};

/// Outcomes are kept for so many steps: step t's in place t % kOutcomes.
constexpr std::int64_t kOutcomes = 4;

/// step->withheld and outcomes[step->step % kOutcomes] from *not_finite. skip_at_most: so many steps of a run may be
/// skipped; one more halts it.
void guard_step(const Execution&, const std::int32_t* not_finite, std::int64_t skip_at_most, StepGuard* guard,
                AdamStep* step, StepOutcome* outcomes);

/// *squared = *rows / (rows_are_scaled ? gradient_scale^2 : 1) + *bias: the squared norm of the gradient before
/// clipping, of what this rank holds. Nothing for a step that is withheld.
void join_norms(const Execution&, const double* rows, bool rows_are_scaled, const double* bias, const AdamStep* step,
                double* squared);

/// *norm = sqrt(*squared). Nothing for a step that is withheld.
void keep_norm(const Execution&, const double* squared, const AdamStep* step, double* norm);

/// step->gradient_scale = bound / *norm where the norm exceeds the bound, else 1.
void clip_to_norm(const Execution&, const double* norm, double bound, AdamStep* step);

}  // namespace weft::kernels
