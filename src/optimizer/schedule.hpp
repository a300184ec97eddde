// SPDX-License-Identifier: Apache-2.0
//
// The learning rate of a step. A pure function of the settings, so that nothing about it needs to be saved.
#pragma once

#include <cstdint>

#include "kernels/optimize/parameters.hpp"
#include "optimizer/settings.hpp"

namespace weft::optimizer {

/// Learning rate of step `step` (from 1) of `steps`: linear warm-up, then the schedule. With p the fraction of all
/// steps done before this one and q = (p - decay_begin) / (1 - decay_begin), clamped to [0, 1]:
///   constant  1          linear  1 - (1 - final) q          cosine  final + (1 - final) (1 + cos(pi q)) / 2
///   step      1 before decay_begin, `final_fraction` from there on
double learning_rate(const Settings&, std::int64_t step, std::int64_t steps);

/// The constants of the update kernels at step `step`; gradient_scale is 1.
kernels::AdamStep adam_step(const Settings&, std::int64_t step, std::int64_t steps, std::uint64_t seed);

}  // namespace weft::optimizer
