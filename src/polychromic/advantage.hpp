// SPDX-License-Identifier: Apache-2.0
//
// Advantages of the answers to one prompt on the host, in fp64, from distances of pairs: for metrics on token ids
// (pair_distances of diversity.hpp), and the reference of kernels/language/diversity.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/language/diversity/set_rule.hpp"
#include "polychromic/polychromic_settings.hpp"

namespace weft::polychromic {

struct PromptAdvantages {
  std::int64_t counted = 0;        ///< m: answers that are present
  double diversity = 0;            ///< mean distance of their pairs
  double objective = 0;            ///< E[f]
  std::vector<double> distances;   ///< [answers]: s_i; 0 for one that is absent
  std::vector<double> advantages;  ///< [answers]: A_i; 0 for one that is absent
};

/// Distances, 1 - cosine of each pair of rows: [rows, rows], symmetric, diagonal 0. 0 with a row of zeros, which stands
/// for an empty answer.
std::vector<double> cosine_distances(kernels::Matrix<const float> embeddings);

/// distances: [answers, answers], symmetric, diagonal 0. present: [answers], 0 for an answer that is absent; empty: all
/// are present. O(answers^2).
PromptAdvantages set_advantages(const kernels::SetRule&, std::span<const double> rewards,
                                std::span<const double> distances, std::span<const char> present = {});

/// Advantages from the rewards r of the m answers that are present, without distances; b: their mean reward.
///
///   supervised   0
///   grpo         r_i - b; standardised: divided by the standard deviation of the m rewards (Shao et al. 2024; without:
///                Liu et al. 2025)
///   rloo         r_i - mean of the other rewards = m / (m - 1) (r_i - b)        (Ahmadian et al. 2024)
///   best_of_n    1 for the answer with the largest reward, of equal ones the first; 0 for others
///
/// All are 0 if the rewards are equal or m < 2: there is nothing to prefer. The objective is b.
PromptAdvantages group_advantages(Objective, bool standardise, std::span<const double> rewards,
                                  std::span<const char> present);

/// Factor of the advantages in the loss of a prompt with `counted` answers: n / (m - n) of sets, else 1 / m, and 1 of
/// best_of_n.
double advantage_factor(const Settings&, std::int64_t counted);

}  // namespace weft::polychromic
