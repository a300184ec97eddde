// SPDX-License-Identifier: Apache-2.0
//
// Truncated Poisson sampling. Let P and Q be the distributions of what all steps release without truncation, of two
// neighbouring data sets, P' and Q' those with it, and t a bound of the probability that any step is truncated. Both
// pairs differ by at most t in every event S, since runs without a truncated step are the same. So
//
//   P'(S) <= P(S) + t <= e^epsilon Q(S) + delta + t <= e^epsilon Q'(S) + delta + (1 + e^epsilon) t
//
// (Chua et al. 2024, arXiv:2411.04205). t is the sum over the steps of Pr[Bin(n + 1, q) > B]: one of the two data sets
// may have a record more than the n of the run. Which records are dropped does not matter.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.hpp"
#include "privacy/accountant/accountant.hpp"

namespace weft::privacy {
namespace {

/// The part of delta that is left for truncation.
constexpr double kTruncationShare = 1e-3;

/// ln (1 + e^epsilon) t
double log_added_delta(const Truncation& truncation, History history, double epsilon) {
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int pass = 0; pass < 2; ++pass)
    for (const Phase& phase : history) {
      if (phase.steps == 0) continue;
      const double term = std::log(static_cast<double>(phase.steps)) +
                          log_binomial_tail(truncation.records + 1, phase.sample_rate, truncation.most);
      if (pass == 0)
        largest = std::max(largest, term);
      else if (largest > -std::numeric_limits<double>::infinity())
        sum += std::exp(term - largest);
    }
  return largest + std::log(std::max(1.0, sum)) + epsilon + std::log1p(std::exp(-epsilon));
}

/// The delta of the steps, without what is left for truncation.
double delta_of_steps(const Truncation& truncation, double delta) {
  return truncation.most == 0 ? delta : (1 - kTruncationShare) * delta;
}

/// Throws Error(usage), with the batch that suffices, if truncation needs more than is left for it.
void require_truncation(const Truncation& truncation, History history, double epsilon, double delta) {
  if (truncation.most == 0) return;
  const double most = std::log(kTruncationShare * delta);
  if (log_added_delta(truncation, history, epsilon) <= most) return;
  Truncation enough{truncation.records, truncation.records + 1};  // never truncated
  for (std::int64_t low = truncation.most; enough.most - low > 1;) {
    const std::int64_t middle = low + (enough.most - low) / 2;
    (log_added_delta({truncation.records, middle}, history, epsilon) <= most ? enough.most : low) = middle;
  }
  throw error(ExitCode::usage,
              "steps of at most {} of {} records are truncated too often for epsilon = {:.4g} (together they would add "
              "more than {:g} of delta = {:g}); take privacy.most_records = {} or more, or fewer steps",
              truncation.most, truncation.records, epsilon, kTruncationShare, delta, enough.most);
}

}  // namespace

double log_binomial_tail(std::int64_t n, double q, std::int64_t most) {
  if (most >= n || q == 0) return -std::numeric_limits<double>::infinity();
  const auto size = static_cast<double>(n), k = static_cast<double>(most + 1), rest = size - k;
  // Terms of the tail fall at least by this ratio.
  const double ratio = rest * q / ((k + 1) * (1 - q));
  if (k <= size * q || !(ratio < 1)) return 0;
  // The first one: n choose k <= sqrt(n / (2 pi k (n - k))) n^n / (k^k (n - k)^(n - k)), by Stirling with its bounds.
  double first = k * std::log(size * q / k);
  if (rest > 0) first += rest * std::log(size * (1 - q) / rest) + 0.5 * std::log(size / (6.283185307179586 * k * rest));
  return std::min(0.0, first - std::log1p(-ratio));
}

double epsilon(AccountantKind kind, History history, double delta, const Truncation& truncation) {
  const double found = epsilon(kind, history, delta_of_steps(truncation, delta));
  require_truncation(truncation, history, found, delta);
  return found;
}

double calibrate(AccountantKind kind, double target, double delta, double sample_rate, std::int64_t steps,
                 History before, const Truncation& truncation) {
  std::vector<Phase> all(before.begin(), before.end());
  all.push_back({sample_rate, 1, steps});
  require_truncation(truncation, all, target, delta);
  return calibrate(kind, target, delta_of_steps(truncation, delta), sample_rate, steps, before);
}

}  // namespace weft::privacy
