// SPDX-License-Identifier: Apache-2.0
#include "polychromic/advantage.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace weft::polychromic {

std::vector<double> cosine_distances(kernels::Matrix<const float> embeddings) {
  const std::int64_t rows = embeddings.rows;
  const auto product = [&](std::int64_t i, std::int64_t j) {
    double sum = 0;
    for (std::int64_t column = 0; column < embeddings.columns; ++column)
      sum += static_cast<double>(embeddings(i, column)) * static_cast<double>(embeddings(j, column));
    return sum;
  };
  std::vector<double> squares, distances(static_cast<std::size_t>(rows * rows));
  for (std::int64_t i = 0; i < rows; ++i) squares.push_back(product(i, i));
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < i; ++j) {
      const double lengths = std::sqrt(squares[static_cast<std::size_t>(i)] * squares[static_cast<std::size_t>(j)]);
      if (lengths == 0) continue;
      distances[static_cast<std::size_t>(i * rows + j)] = distances[static_cast<std::size_t>(j * rows + i)] =
          1 - product(i, j) / lengths;
    }
  return distances;
}

PromptAdvantages set_advantages(const kernels::SetRule& rule, std::span<const double> rewards,
                                std::span<const double> distances, std::span<const char> present) {
  const std::size_t answers = rewards.size();
  if (rule.set_size < 2 || distances.size() != answers * answers || (!present.empty() && present.size() != answers))
    throw error(ExitCode::internal, "set_advantages: {} distances for {} rewards, sets of {}", distances.size(),
                answers, rule.set_size);
  const auto counts = [&](std::size_t i) { return present.empty() || present[i] != 0; };
  PromptAdvantages out{.distances = std::vector<double>(answers), .advantages = std::vector<double>(answers)};
  std::vector<double> reward_distances(answers);
  kernels::SetSums sums;
  for (std::size_t i = 0; i < answers; ++i) {
    if (!counts(i)) continue;
    ++sums.count;
    for (std::size_t j = 0; j < answers; ++j) {
      if (!counts(j)) continue;
      out.distances[i] += distances[i * answers + j];
      reward_distances[i] += rewards[j] * distances[i * answers + j];
    }
    sums.rewards += rewards[i];
    sums.pairs += out.distances[i] / 2;
    sums.reward_pairs += rewards[i] * out.distances[i];
  }
  out.counted = sums.count;
  const kernels::SetFactors factors = kernels::set_factors(rule, sums.count);
  out.diversity = kernels::mean_distance(factors, sums);
  out.objective = kernels::expected_objective(rule, factors, sums);
  for (std::size_t i = 0; i < answers; ++i)
    if (counts(i))
      out.advantages[i] =
          kernels::set_advantage(rule, factors, sums, rewards[i], out.distances[i], reward_distances[i]);
  return out;
}

PromptAdvantages group_advantages(Objective objective, bool standardise, std::span<const double> rewards,
                                  std::span<const char> present) {
  PromptAdvantages out{.distances = std::vector<double>(rewards.size()),
                       .advantages = std::vector<double>(rewards.size())};
  std::vector<std::size_t> counted;
  for (std::size_t i = 0; i < rewards.size(); ++i)
    if (present[i] != 0) counted.push_back(i);
  out.counted = std::ssize(counted);
  if (counted.empty()) return out;
  const double m = static_cast<double>(counted.size());
  for (const std::size_t i : counted) out.objective += rewards[i] / m;
  const auto [least, most] = std::minmax_element(counted.begin(), counted.end(),
                                                 [&](std::size_t a, std::size_t b) { return rewards[a] < rewards[b]; });
  // Compared, not subtracted from their rounded mean: equal rewards have exactly no gradient.
  if (rewards[*least] == rewards[*most] || objective == Objective::supervised) return out;
  if (objective == Objective::best_of_n) {
    out.advantages[*std::find_if(counted.begin(), counted.end(),
                                 [&](std::size_t i) { return rewards[i] == rewards[*most]; })] = 1;
    return out;
  }
  double squares = 0;
  for (const std::size_t i : counted) squares += (rewards[i] - out.objective) * (rewards[i] - out.objective);
  const double factor = objective == Objective::rloo ? m / (m - 1) : standardise ? 1 / std::sqrt(squares / m) : 1;
  for (const std::size_t i : counted) out.advantages[i] = factor * (rewards[i] - out.objective);
  return out;
}

double advantage_factor(const Settings& settings, std::int64_t counted) {
  if (settings.of_sets()) return kernels::gradient_factor(settings.set_size, counted);
  if (settings.objective == Objective::best_of_n) return 1;
  return counted > 0 ? 1 / static_cast<double>(counted) : 0;
}

}  // namespace weft::polychromic
