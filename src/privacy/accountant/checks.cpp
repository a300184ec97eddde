// SPDX-License-Identifier: Apache-2.0
#include "privacy/accountant/checks.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.hpp"

namespace weft::privacy {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

/// ln of the probability that a standard normal number exceeds x.
double log_normal_tail(double x) { return log_erfc(x / std::sqrt(2.0)) - std::log(2.0); }
double normal_tail(double x) { return 0.5 * std::erfc(x / std::sqrt(2.0)); }

double gaussian_delta(double mu, double epsilon) {
  return std::exp(log_normal_tail(epsilon / mu - mu / 2)) - std::exp(epsilon + log_normal_tail(epsilon / mu + mu / 2));
}

bool counts(const Phase& phase) { return phase.steps > 0 && phase.sample_rate > 0; }

}  // namespace

double log_erfc(double x) {
  if (x < 25) return std::log(std::erfc(x));
  const double square = x * x, r = 1 / square;
  constexpr double half_log_pi = 0.57236494292470008707;
  return -square - std::log(x) - half_log_pi + std::log1p(r * (-0.5 + r * (0.75 - r * 1.875)));
}

double gaussian_epsilon(double mu, double delta) {
  if (mu == 0) return 0;
  if (!(mu < kUnlimited)) return mu;  // NaN stays NaN
  if (gaussian_delta(mu, 0) <= delta) return 0;
  double low = 0, high = 1;
  while (high < kUnlimited && !(gaussian_delta(mu, high) <= delta)) low = std::exchange(high, 2 * high);
  if (high == kUnlimited) return high;
  while (high - low > 1e-9 * high) {
    const double middle = 0.5 * (low + high);
    (gaussian_delta(mu, middle) > delta ? low : high) = middle;
  }
  return high;
}

double full_batch_mu(History history) {
  double square = 0;
  for (const Phase& phase : history)
    if (counts(phase) && phase.sample_rate == 1)
      square += static_cast<double>(phase.steps) / (phase.noise_multiplier * phase.noise_multiplier);
  return std::sqrt(square);
}

bool is_full_batch(History history) {
  return std::all_of(history.begin(), history.end(),
                     [](const Phase& phase) { return !counts(phase) || phase.sample_rate == 1; });
}

double least_epsilon(History history, double delta) {
  double least = gaussian_epsilon(full_batch_mu(history), delta);
  double largest = 0;
  for (const Phase& phase : history)
    if (counts(phase)) largest = std::max(largest, phase.noise_multiplier);
  constexpr int points = 64;
  for (int i = 0; i < points; ++i) {
    const double x = 0.5 + (0.5 + 10 * largest) * i / points;
    double log_absent = 0, log_absent_without = 0;  // ln of the probability that no output exceeds x
    for (const Phase& phase : history) {
      if (!counts(phase)) continue;
      const double q = phase.sample_rate, sigma = phase.noise_multiplier, n = static_cast<double>(phase.steps);
      const double without = normal_tail(x / sigma);
      log_absent += n * std::log1p(-(q * normal_tail((x - 1) / sigma) + (1 - q) * without));
      log_absent_without += n * std::log1p(-without);
    }
    const double with = -std::expm1(log_absent), without = -std::expm1(log_absent_without);
    if (with > delta && without > 1e-290) least = std::max(least, std::log(with - delta) - std::log(without));
  }
  return least;
}

void require_bound(std::string_view accountant, double found, History history, double delta) {
  // 1e-9: the relative error of exact values.
  const double least = least_epsilon(history, delta);
  if (found >= least - 1e-9 * (1 + least)) return;
  throw error(ExitCode::internal,
              "the accountant {} found epsilon = {} for {} steps at delta = {}, but it is at least {:.6g} (an error of "
              "the program); take another accountant",
              accountant, found, steps_of(history), delta, least);
}

}  // namespace weft::privacy
