// SPDX-License-Identifier: Apache-2.0
//
// The noise for a target: a root of epsilon(noise) = target. One epsilon by prv takes up to seconds, so that its root
// is sought with coarse estimates, and what was found is then evaluated with its bounds, a few times.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "privacy/accountant/accountant.hpp"

namespace weft::privacy {
namespace {

/// Range of noise multipliers of an input. Below twice the smallest one, no smaller one is sought.
constexpr double kLeastNoise = 0.01, kMostNoise = 1e6;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Epsilon as a function of the noise multiplier. It decreases.
using Curve = std::function<double(double)>;

/// Doubles `high` until the curve is at most `target` there. Nothing if the most noise does not suffice.
std::optional<double> bracket(const Curve& curve, double target, double high) {
  while (!(curve(high) <= target)) {
    high *= 2;
    if (high > kMostNoise) return std::nullopt;
  }
  return high;
}

/// Noise at which the curve is in [target - tolerance, target], by bisection from `high`, at which it is at most
/// `target`.
double bisect(const Curve& curve, double target, double tolerance, double high) {
  double low = high > 10 ? high / 2 : 0, reached = curve(high);
  while (target - reached > tolerance && high - low > 1e-9 * high) {
    const double middle = 0.5 * (low + high);
    if (middle < kLeastNoise) break;
    if (const double found = curve(middle); found < target) {
      high = middle;
      reached = found;
    } else {
      low = middle;
    }
  }
  return high;
}

/// Finds the root of bisect in fewer evaluations: by the chord of ln epsilon over ln noise, or the middle where that
/// converges slowly.
double by_chords(const Curve& curve, double target, double tolerance, double high) {
  double above = curve(high), low = high, below = above;  // the values at high, low
  while (below <= target) {
    high = std::exchange(low, low / 2);
    above = below;
    if (low < kLeastNoise) return high;
    below = curve(low);
  }
  for (int i = 0; i < 40 && target - above > tolerance && high - low > 1e-9 * high; ++i) {
    const double aim = target - 0.5 * tolerance;
    double part =
        i % 3 == 2 || !(above > 0) || below == kInfinity ? 0.5 : std::log(below / aim) / std::log(below / above);
    part = std::clamp(part, 0.01, 0.99);
    const double middle = low * std::pow(high / low, part);
    const double found = curve(middle);
    if (found <= target)
      high = middle, above = found;
    else
      low = middle, below = found;
  }
  return high;
}

}  // namespace

double calibrate(AccountantKind kind, double target, double delta, double sample_rate, std::int64_t steps,
                 History before) {
  const double tolerance = 0.01 * std::min(1.0, target);
  std::vector<Phase> all(before.begin(), before.end());
  all.push_back({sample_rate, 0, steps});
  std::string problem = steps_of(before) > 0 ? "the steps so far count too" : "";
  const auto with = [&](double noise) -> History {
    all.back().noise_multiplier = noise;
    return all;
  };
  const auto unreachable = [&] {
    return error(ExitCode::usage,
                 "epsilon = {} cannot be reached with {} steps at a sample rate of {} and delta = {} by the accountant "
                 "{}{}; take a larger epsilon or delta, or another accountant",
                 target, steps, sample_rate, delta, name_of(kind),
                 problem.empty() ? "" : fmt::format(" ({})", problem));
  };
  const Curve exact = [&](double noise) {
    try {
      return epsilon(kind, with(noise), delta);
    } catch (const Error& failure) {  // too little noise for the accountant
      if (failure.code() == ExitCode::internal) throw;
      if (steps_of(before) == 0) problem = failure.what();
      return kInfinity;
    }
  };
  constexpr double first = 10;
  if (kind == AccountantKind::rdp || kind == AccountantKind::gdp) {
    const std::optional<double> high = bracket(exact, target, first);
    if (!high) throw unreachable();
    return bisect(exact, target, tolerance, *high);
  }
  const Curve estimate = [&](double noise) { return prv_estimate(with(noise), delta); };
  double aim = target - 1.5 * tolerance;  // of the estimate: the upper bound is above it by up to a tolerance
  std::optional<double> best;
  for (int round = 0; round < 4 && aim > 0; ++round) {
    const std::optional<double> high = bracket(estimate, aim, first);
    if (!high) break;
    const double noise = by_chords(estimate, aim, 0.1 * tolerance, *high), found = exact(noise);
    if (found <= target) best = std::min(best.value_or(noise), noise);
    if (found == kInfinity || (found <= target && (target - found <= tolerance || noise < 2 * kLeastNoise))) break;
    aim += target - 0.5 * tolerance - found;
  }
  if (best) return *best;
  // No estimate comes so close to 0; the bound of rdp, which that of prv never exceeds, may.
  const Curve bound = [&](double noise) { return rdp_epsilon(with(noise), delta, rdp_orders()).epsilon; };
  if (const std::optional<double> high = bracket(bound, target, first))
    if (const double noise = bisect(bound, target, tolerance, *high); exact(noise) <= target) return noise;
  throw unreachable();
}

}  // namespace weft::privacy
