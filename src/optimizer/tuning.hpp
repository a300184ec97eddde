// SPDX-License-Identifier: Apache-2.0
//
// The learning rate by the loss, three methods (optimizer.tuning):
//
//   range     before the first step: a sweep of the learning rate finds the one from which the loss falls fastest
//             (Smith, arXiv 1506.01186); a tenth of it replaces optimizer.learning_rate
//   plateau   half the rate after `tuning_patience` steps in which the mean of the last 20 losses has no new minimum,
//             or at once at a loss above 1.5 times that mean; never below 1e-7
//   greedy    GreedyLR (arXiv 2512.14527): down by a tenth after `tuning_patience` steps with a mean above its minimum,
//             up in the same ratio after as many with a new minimum; between a tenth and ten times the schedule's rate
//
// All of them give a factor of the schedule's rate, kept in kernels::TuningState. Steps of the warm-up are not
// evaluated.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/optimize/rate_tuning.hpp"
#include "optimizer/optimizer_settings.hpp"

namespace weft::optimizer {

/// The rule for `settings.tuning`; for `none` and `range` a constant factor.
kernels::TuningRule tuning_rule(const Settings& settings, std::int64_t steps);

/// The sweep of a learning-rate range test: kSteps steps with exponentially growing rates. Losses are smoothed by an
/// exponential average with bias correction.
class RangeTest {
 public:
  static constexpr std::int64_t kSteps = 100;
  static constexpr double kFirst = 1e-7, kLast = 1;

  /// The learning rate of step `step` of the sweep, from 0.
  static double rate(std::int64_t step);
  /// Takes the loss of the next step. False: the sweep ends, after its last step or because the loss diverges.
  bool add(double loss);
  /// A tenth of the rate at which the smoothed loss falls fastest; 0 if it falls nowhere.
  double result() const;

 private:
  std::vector<double> smoothed_;
  double average_ = 0;  // without bias correction
};

}  // namespace weft::optimizer
