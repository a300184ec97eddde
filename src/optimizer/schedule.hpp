// SPDX-License-Identifier: Apache-2.0
//
// Learning-rate schedules. Pure functions of settings and step: checkpoints store no schedule state.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/optimize/parameter_rows.hpp"
#include "optimizer/optimizer_settings.hpp"

namespace weft::optimizer {

/// Learning rate of step `step` (from 1) of a run of `steps`: linear warm-up, then the schedule, which extends over
/// schedule_steps or, if that is 0, over `steps`. With p the fraction of the schedule done before this step, b the
/// later one of decay_begin and the end of the warm-up, and q = (p - b) / (1 - b), clamped to [0, 1]:
///   constant  1          linear  1 - (1 - final) q          cosine  final + (1 - final) (1 + cos(pi q)) / 2
///   step      1 before b, `final_fraction` from there on    wsd     1 - (1 - final) sqrt(q)
/// wsd (warm-up, stable, decay) has the "1-sqrt" cooldown of Hägele et al., arXiv 2405.18392.
double learning_rate(const Settings&, std::int64_t step, std::int64_t steps);

/// Steps of the warm-up in a run of `steps`; with a fraction not always whole.
double warmup(const Settings&, std::int64_t steps);

/// A warning about a run that has done `done` steps and continues with another length of its schedule: "" if the next
/// step has the learning rate that it would have had. Lengths are values of run.steps and optimizer.schedule_steps.
struct ScheduleLength {
  std::int64_t run_steps, schedule_steps;
  std::int64_t steps() const { return schedule_steps > 0 ? schedule_steps : run_steps; }
};
std::string schedule_warning(const Settings&, std::int64_t done, ScheduleLength before, ScheduleLength now);

/// Parameters of the Adam kernels at step `step` (from 1) of `steps`; gradient_scale is 1. `seed` is that of stochastic
/// rounding. `loss_factor`: of all gradients, for EpsilonScale::loss.
kernels::AdamStep adam_step(const Settings&, std::int64_t step, std::int64_t steps, std::uint64_t seed,
                            double loss_factor = 1);

}  // namespace weft::optimizer
