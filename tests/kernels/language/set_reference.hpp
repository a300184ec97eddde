// SPDX-License-Identifier: Apache-2.0
//
// Reference of the set objective: all sets of n answers, one by one, in fp64.
#pragma once

#include <bit>
#include <cmath>
#include <vector>

#include "kernels/language/diversity/set_rule.hpp"

namespace weft::testing {

struct SetReference {
  double objective = 0;
  std::vector<double> advantages;
};

/// distances: [m, m] of the m answers. At most 20 answers.
inline SetReference all_sets(const kernels::SetRule& rule, const std::vector<double>& rewards,
                             const std::vector<double>& distances) {
  const std::size_t m = rewards.size();
  const double n = static_cast<double>(rule.set_size);
  double sum = 0, sets = 0;
  std::vector<double> with(m), sets_with(m);
  for (std::uint32_t set = 0; set < 1u << m; ++set) {
    if (std::popcount(set) != rule.set_size) continue;
    double reward = 0, distance = 0;
    for (std::size_t i = 0; i < m; ++i) {
      if ((set >> i & 1) == 0) continue;
      reward += rewards[i] / n;
      for (std::size_t j = 0; j < i; ++j)
        if ((set >> j & 1) != 0) distance += distances[i * m + j] / (n * (n - 1) / 2);
    }
    const double f = rule.objective == kernels::SetObjective::product ? reward * distance
                                                                      : reward + rule.diversity_weight * distance;
    sum += f;
    sets += 1;
    for (std::size_t i = 0; i < m; ++i)
      if ((set >> i & 1) != 0) with[i] += f, sets_with[i] += 1;
  }
  SetReference out{sum / sets, {}};
  for (std::size_t i = 0; i < m; ++i) out.advantages.push_back(with[i] / sets_with[i] - out.objective);
  return out;
}

/// 1 - cosine of rows of `columns` values, [rows, rows], in fp64.
template <class T>
std::vector<double> cosine_distances(const std::vector<T>& rows, std::size_t columns) {
  const std::size_t m = rows.size() / columns;
  std::vector<double> z(rows.begin(), rows.end()), distances(m * m);
  for (std::size_t i = 0; i < m; ++i) {
    double square = 0;
    for (std::size_t c = 0; c < columns; ++c) square += z[i * columns + c] * z[i * columns + c];
    for (std::size_t c = 0; c < columns; ++c) z[i * columns + c] /= std::sqrt(square);
  }
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t j = 0; j < m; ++j) {
      double square = 0;
      for (std::size_t c = 0; c < columns; ++c) square += std::pow(z[i * columns + c] - z[j * columns + c], 2);
      distances[i * m + j] = square / 2;
    }
  return distances;
}

}  // namespace weft::testing
