// SPDX-License-Identifier: Apache-2.0
#include "privacy/accountant/accountant.hpp"

#include <cmath>
#include <limits>
#include <utility>

#include "base/error.hpp"

namespace weft::privacy {
namespace {

double normal_below(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

/// delta of the Gaussian mechanism with parameter mu (Dong, Roth, Su 2019, arXiv:1905.02383, corollary 1).
double gdp_delta(double mu, double epsilon) {
  const double tail = normal_below(-epsilon / mu - mu / 2);
  return normal_below(-epsilon / mu + mu / 2) - (tail > 0 ? std::exp(epsilon + std::log(tail)) : 0);
}

}  // namespace

std::int64_t steps_of(History history) {
  std::int64_t steps = 0;
  for (const Phase& phase : history) steps += phase.steps;
  return steps;
}

double gdp_epsilon(History history, double delta) {
  double square = 0;
  for (const Phase& phase : history) {
    const double q = phase.sample_rate, sigma = phase.noise_multiplier;
    if (phase.steps > 0 && q > 0) square += q * q * static_cast<double>(phase.steps) * std::expm1(1 / (sigma * sigma));
  }
  if (square == 0) return 0;
  if (square == std::numeric_limits<double>::infinity()) return std::numeric_limits<double>::infinity();
  const double mu = std::sqrt(square);
  if (gdp_delta(mu, 0) <= delta) return 0;
  double low = 0, high = 1;
  while (gdp_delta(mu, high) > delta) low = std::exchange(high, 2 * high);
  while (high - low > 1e-9 * high) {
    const double middle = 0.5 * (low + high);
    (gdp_delta(mu, middle) > delta ? low : high) = middle;
  }
  return high;
}

double epsilon(AccountantKind kind, History history, double delta) {
  const double found = kind == AccountantKind::prv   ? prv_epsilon(history, delta).upper
                       : kind == AccountantKind::rdp ? rdp_epsilon(history, delta, rdp_orders()).epsilon
                                                     : gdp_epsilon(history, delta);
  if (!std::isfinite(found))
    throw error(ExitCode::usage,
                "the accountant {} has no finite epsilon for {} steps with so little noise; take a larger noise "
                "multiplier",
                name_of(kind), steps_of(history));
  return found;
}

double calibrate(AccountantKind kind, double target, double delta, double sample_rate, std::int64_t steps,
                 History before) {
  constexpr double first = 10, largest = 1e6;
  const double tolerance = std::min(0.01, 0.01 * target);
  std::vector<Phase> all(before.begin(), before.end());
  all.push_back({sample_rate, first, steps});
  const auto epsilon_with = [&](double sigma) {
    all.back().noise_multiplier = sigma;
    try {
      return epsilon(kind, all, delta);
    } catch (const Error&) {  // too little noise for the accountant
      return std::numeric_limits<double>::infinity();
    }
  };
  double low = 0, high = first, reached = epsilon_with(high);
  while (reached > target) {
    low = high;
    high *= 2;
    if (high > largest)
      throw error(
          ExitCode::usage,
          "epsilon = {} cannot be reached with {} steps at a sample rate of {} and delta = {} by the accountant "
          "{}{}; take a larger epsilon",
          target, steps, sample_rate, delta, name_of(kind),
          steps_of(before) > 0 ? " (the steps so far count too)"
          : kind == AccountantKind::prv && target <= kPrvEpsilonError
              ? fmt::format(" (its error bound alone is {})", kPrvEpsilonError)
              : "");
    reached = epsilon_with(high);
  }
  while (target - reached > tolerance && high - low > 1e-9 * high) {
    const double middle = 0.5 * (low + high);
    if (const double here = epsilon_with(middle); here < target) {
      high = middle;
      reached = here;
    } else {
      low = middle;
    }
  }
  return high;
}

std::string_view name_of(AccountantKind kind) {
  switch (kind) {
    case AccountantKind::prv:
      return "prv";
    case AccountantKind::rdp:
      return "rdp";
    case AccountantKind::gdp:
      return "gdp";
  }
  return "";
}

}  // namespace weft::privacy
