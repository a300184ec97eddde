// SPDX-License-Identifier: Apache-2.0
#include "polychromic/reward_constraint.hpp"

#include <algorithm>
#include <cmath>

namespace weft::polychromic {
namespace {

/// Largest change of log alpha: a reward that never reaches its target must not let the weight grow without limit.
constexpr double kLargestChange = 4;
/// Number of batches of the exponential moving average.
constexpr double kAverage = 4;

}  // namespace

void RewardConstraint::observe(double reward) {
  state_.batches += 1;
  // The mean of all batches until there are enough for the exponential one.
  const double share = 1 / std::min(state_.batches, kAverage);
  state_.error += share * (reward - state_.target - state_.error);
  const double limit = kLargestChange * static_cast<double>(settings_.hold_horizon) / settings_.hold_gain;
  state_.sum = std::clamp(state_.sum + state_.error, -limit, limit);
}

double RewardConstraint::diversity_weight() const {
  const double change = settings_.hold_gain * (state_.error + state_.sum / static_cast<double>(settings_.hold_horizon));
  return settings_.diversity_weight * std::exp(std::clamp(change, -kLargestChange, kLargestChange));
}

void RewardConstraint::add_to(checkpoint::Registry& registry, bool writes) {
  constexpr std::int64_t kNumbers = sizeof(State) / sizeof(double);
  registry.add({.name = "policy/reward_constraint",
                .type = kernels::Scalar::fp64,
                .shape = {kNumbers},
                .held = {0, kNumbers},
                .owned = {0, writes ? kNumbers : 0},
                .data = &state_});
}

}  // namespace weft::polychromic
