// SPDX-License-Identifier: Apache-2.0
//
// Rényi divergence of the subsampled Gaussian mechanism (arXiv:1908.10530, section 3.3):
//
//   A(alpha) = E over z ~ N(0, sigma^2) of ((1 - q) + q exp((2 z - 1) / (2 sigma^2)))^alpha
//   rdp(alpha) = ln A(alpha) / (alpha - 1)
//
// For integer alpha a sum of alpha + 1 terms; otherwise two series, below and above the point z0 where both parts of
// the mixture are equal. All sums are of logarithms.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/error.hpp"
#include "privacy/accountant/accountant.hpp"
#include "privacy/accountant/checks.hpp"

namespace weft::privacy {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

/// Logarithm of a sum, ln(e^a + e^b).
double log_add(double a, double b) {
  if (a < b) std::swap(a, b);
  return b == -kUnbounded ? a : a + std::log1p(std::exp(b - a));
}

/// Logarithm of a difference, ln(e^a - e^b); -infinity where rounding makes the difference negative.
double log_subtract(double a, double b) {
  if (b == -kUnbounded) return a;
  return a <= b ? -kUnbounded : a + std::log1p(-std::exp(b - a));
}

double log_moment(double q, double sigma, std::int64_t order) {
  const double variance = sigma * sigma, log_q = std::log(q), log_rest = std::log1p(-q);
  const auto n = static_cast<double>(order);
  double sum = -kUnbounded;
  for (std::int64_t i = 0; i <= order; ++i) {
    const auto k = static_cast<double>(i);
    const double log_binomial = std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1);
    sum = log_add(sum, log_binomial + k * log_q + (n - k) * log_rest + (k * k - k) / (2 * variance));
  }
  return sum;
}

double log_moment(double q, double sigma, double order) {
  // Terms fall at least like i^-(order + 1) and alternate: the rest is less than the last one, which is added at the
  // limit, so that the result stays an upper bound.
  constexpr std::int64_t most_terms = 20'000;
  constexpr double smallest_term = -30;
  const double variance = sigma * sigma, log_q = std::log(q), log_rest = std::log1p(-q);
  const double middle = variance * std::log(1 / q - 1) + 0.5, scale = std::sqrt(2.0) * sigma;
  const double log_half = std::log(0.5);
  std::array<double, 2> sums = {-kUnbounded, -kUnbounded};
  double log_binomial = 0;  // of |binomial(order, i)|
  bool positive = true;
  for (std::int64_t step = 0;; ++step) {
    const auto i = static_cast<double>(step), j = order - i;
    const std::array<double, 2> terms = {log_binomial + i * log_q + j * log_rest + (i * i - i) / (2 * variance) +
                                             log_half + log_erfc((i - middle) / scale),
                                         log_binomial + j * log_q + i * log_rest + (j * j - j) / (2 * variance) +
                                             log_half + log_erfc((middle - j) / scale)};
    const bool last = step == most_terms;
    for (std::size_t side = 0; side < 2; ++side)
      sums[side] = positive || last ? log_add(sums[side], terms[side]) : log_subtract(sums[side], terms[side]);
    if (last || std::max(terms[0], terms[1]) < smallest_term) break;
    log_binomial += std::log(std::abs(j)) - std::log(i + 1);
    positive = positive == (j > 0);
  }
  return log_add(sums[0], sums[1]);
}

}  // namespace

double rdp_of_step(double q, double sigma, double order) {
  if (q == 0) return 0;
  if (q == 1) return order / (2 * sigma * sigma);
  const bool whole = order == std::floor(order);
  const double moment = whole ? log_moment(q, sigma, static_cast<std::int64_t>(order)) : log_moment(q, sigma, order);
  // A NaN is a difference of infinite numbers.
  return std::isnan(moment) ? kUnbounded : std::max(0.0, moment) / (order - 1);
}

const std::vector<double>& rdp_orders() {
  static const std::vector<double> orders = [] {
    std::vector<double> all;
    for (int tenths = 11; tenths < 110; ++tenths) all.push_back(tenths / 10.0);
    for (int order = 12; order < 64; ++order) all.push_back(order);
    for (int order = 64; order <= 16'384; order *= 2) all.push_back(order);
    return all;
  }();
  return orders;
}

RdpEpsilon rdp_epsilon(History history, double delta, std::span<const double> orders) {
  if (std::none_of(history.begin(), history.end(),
                   [](const Phase& phase) { return phase.steps > 0 && phase.sample_rate > 0; }))
    return {};
  RdpEpsilon best{.epsilon = kUnbounded};
  for (const double order : orders) {
    double divergence = 0;
    for (const Phase& phase : history)
      if (phase.steps > 0)
        divergence += static_cast<double>(phase.steps) * rdp_of_step(phase.sample_rate, phase.noise_multiplier, order);
    // Balle et al. 2020, arXiv:1905.09982, theorem 21
    const double epsilon = divergence - (std::log(delta) + std::log(order)) / (order - 1) + std::log1p(-1 / order);
    if (epsilon < best.epsilon) best = {epsilon, order};
  }
  if (best.epsilon < 0) best.epsilon = 0;
  require_bound("rdp", best.epsilon, history, delta);
  return best;
}

}  // namespace weft::privacy
