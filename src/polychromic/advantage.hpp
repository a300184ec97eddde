// SPDX-License-Identifier: Apache-2.0
//
// Advantages of the answers to one prompt on the host, in fp64, from distances of pairs: for metrics on token ids
// (pair_distances of diversity.hpp), and the reference of kernels/language/diversity.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/language/diversity/set_rule.hpp"

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

}  // namespace weft::polychromic
