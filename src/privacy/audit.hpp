// SPDX-License-Identifier: Apache-2.0
//
// A lower bound of the epsilon of one run, from guesses which of its canaries were among its records (Steinke, Nasr,
// Jagielski 2023, arXiv:2305.08846). Each of m canaries is a record with probability 1/2. A training with (epsilon,
// delta) gives r guesses v right ones or more with at most the probability
//
//   P[B >= v] + 2 m delta max over i of P[v - i <= B < v] / i,       B binomial (r, e^epsilon / (1 + e^epsilon))
//
// whatever the guesses were made from, with r chosen before.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft::privacy {

struct Guesses {
  std::int64_t canaries = 0, made = 0, right = 0;
};

/// `made` guesses: half of them, that the canaries with the highest scores are among the records; the others, that
/// those with the lowest scores are not. `made` is even and at most the number of canaries.
Guesses guess(std::span<const double> scores, const std::vector<bool>& among_records, std::int64_t made);

/// The probability above; at most 1.
double probability_of_guesses(const Guesses&, double epsilon, double delta);

/// The lower bound of epsilon that the guesses give: the largest one with a probability of at most 1 - confidence;
/// 0 if there is none.
double least_epsilon(const Guesses&, double delta, double confidence);

}  // namespace weft::privacy
