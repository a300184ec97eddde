// SPDX-License-Identifier: Apache-2.0
#include "privacy/audit.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/contract.hpp"

namespace weft::privacy {

Guesses guess(std::span<const double> scores, const std::vector<bool>& among_records, std::int64_t made) {
  WEFT_ASSERT(scores.size() == among_records.size() && made % 2 == 0 && made <= std::ssize(scores));
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  Guesses guesses{std::ssize(scores), made, 0};
  for (std::size_t i = 0; i < static_cast<std::size_t>(made / 2); ++i)
    guesses.right += (among_records[order[i]] ? 1 : 0) + (among_records[order[order.size() - 1 - i]] ? 0 : 1);
  return guesses;
}

double probability_of_guesses(const Guesses& guesses, double epsilon, double delta) {
  // The logarithms of e^epsilon / (1 + e^epsilon) and of its complement, also for a large epsilon.
  const double log_wrong = -epsilon - std::log1p(std::exp(-epsilon)), log_right = -std::log1p(std::exp(-epsilon));
  const auto made = static_cast<double>(guesses.made);
  const auto mass = [&](std::int64_t right) {
    const auto k = static_cast<double>(right);
    return std::exp(std::lgamma(made + 1) - std::lgamma(k + 1) - std::lgamma(made - k + 1) + k * log_right +
                    (made - k) * log_wrong);
  };
  double tail = 0, below = 0, most = 0;
  for (std::int64_t k = guesses.made; k >= guesses.right; --k) tail += mass(k);
  for (std::int64_t i = 1; i <= guesses.right; ++i) {
    below += mass(guesses.right - i);
    most = std::max(most, below / static_cast<double>(i));
  }
  return std::min(1.0, tail + 2 * static_cast<double>(guesses.canaries) * delta * most);
}

double least_epsilon(const Guesses& guesses, double delta, double confidence) {
  const auto excluded = [&](double epsilon) {
    return probability_of_guesses(guesses, epsilon, delta) <= 1 - confidence;
  };
  if (!excluded(0)) return 0;
  double low = 0, high = 1;
  while (excluded(high)) high *= 2;
  for (int i = 0; i < 60; ++i) (excluded((low + high) / 2) ? low : high) = (low + high) / 2;
  return low;
}

}  // namespace weft::privacy
