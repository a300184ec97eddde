// SPDX-License-Identifier: Apache-2.0
#include "optimizer/tuning.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "optimizer/schedule.hpp"

namespace weft::optimizer {
namespace {

constexpr double kSmoothing = 0.98;
constexpr double kDivergence = 4;  // times the least smoothed loss
/// Averages over fewer losses are mostly noise: their slopes are not compared.
constexpr std::size_t kLeastLosses = 10;
constexpr double kLeastFall = 1e-6;  // relative; less is rounding
constexpr double kBelowSteepest = 0.1;

constexpr double kLeastRate = 1e-7;

}  // namespace

kernels::TuningRule tuning_rule(const Settings& settings, std::int64_t steps) {
  kernels::TuningRule rule;
  rule.first_step = static_cast<std::int64_t>(std::ceil(warmup(settings, steps))) + 1;
  rule.patience = settings.tuning_patience;
  switch (settings.tuning) {
    case Tuning::none:
    case Tuning::range:
      rule.first_step = std::numeric_limits<std::int64_t>::max();
      break;
    case Tuning::plateau:
      rule.down = 0.5;
      rule.spike = 1.5;
      rule.cooldown = 5;
      rule.lowers_on_plateau = true;
      rule.least = std::min(1.0, kLeastRate / settings.learning_rate);
      break;
    case Tuning::greedy:
      rule.down = 0.9;
      rule.up = 1 / 0.9;
      rule.change = 1e-4;
      rule.least = 0.1;
      rule.largest = 10;
      break;
  }
  return rule;
}

double RangeTest::rate(std::int64_t step) {
  return kFirst * std::pow(kLast / kFirst, static_cast<double>(step) / static_cast<double>(kSteps - 1));
}

bool RangeTest::add(double loss) {
  if (!std::isfinite(loss)) return false;
  average_ = kSmoothing * average_ + (1 - kSmoothing) * loss;
  smoothed_.push_back(average_ / (1 - std::pow(kSmoothing, static_cast<double>(smoothed_.size() + 1))));
  return std::ssize(smoothed_) < kSteps &&
         smoothed_.back() <= kDivergence * *std::min_element(smoothed_.begin(), smoothed_.end());
}

double RangeTest::result() const {
  double steepest = 0;
  std::size_t at = 0;
  for (std::size_t i = kLeastLosses; i + 1 < smoothed_.size(); ++i) {
    const double slope = smoothed_[i + 1] - smoothed_[i - 1];  // rates have equal ratios
    if (slope >= steepest || slope > -kLeastFall * std::abs(smoothed_[i])) continue;
    steepest = slope;
    at = i;
  }
  return at == 0 ? 0 : kBelowSteepest * rate(static_cast<std::int64_t>(at));
}

}  // namespace weft::optimizer
