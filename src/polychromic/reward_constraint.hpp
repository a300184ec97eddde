// SPDX-License-Identifier: Apache-2.0
//
// Largest diversity at a given mean reward: max D subject to R = target. The Lagrangian D + mu (R - target) is the
// additive objective R + alpha D with alpha = 1 / mu. Dual ascent on log mu with the measured rewards, damped by a
// proportional term (PID Lagrangian: Stooke, Achiam, Abbeel 2020, arXiv 2007.03964):
//
//   e       exponential mean over 4 batches of answers of (mean reward of the batch - target)
//   s       sum of e over the batches
//   alpha = alpha_0 exp(gain (e + s / horizon))
//
// A reward above the target raises the weight of the diversity, one below lowers it. Without the proportional term the
// weight oscillates: the reward is itself a sum over the steps.
#pragma once

#include <cstdint>

#include "checkpoint/registry.hpp"
#include "polychromic/polychromic_settings.hpp"

namespace weft::polychromic {

class RewardConstraint {
 public:
  explicit RewardConstraint(const Settings& settings) : settings_(settings) {}

  /// Sets the target, before the first batch.
  void begin(double target) { state_ = {.target = target}; }
  /// Updates the weight from the mean reward of a batch of answers over all ranks.
  void observe(double reward);
  double target() const { return state_.target; }
  double diversity_weight() const;

  /// Adds the state, the same on all ranks and written by one.
  void add_to(checkpoint::Registry&, bool writes);

 private:
  struct State {
    double target = 0;
    double batches = 0;  // that were observed
    double error = 0;    // e
    double sum = 0;      // s
  };

  const Settings& settings_;
  State state_;
};

}  // namespace weft::polychromic
