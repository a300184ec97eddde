// SPDX-License-Identifier: Apache-2.0
//
// Objective of sets of answers, and marginal advantages, exact over all sets of n of m answers to a prompt
// (polychromic objective: arXiv 2509.25424; for language models arXiv 2604.17654):
//
//   product    f(S) = R(S) D(S)            R(S): mean reward of the set
//   additive   f(S) = R(S) + alpha D(S)    D(S): mean distance of its pairs
//
//   A_i = E[f(S) | i in S] - E[f(S)]       S: uniform over the sets of n answers
//
// With distances d_ij = d_ji of pairs, s_i = sum_j d_ij and q_i = sum_j R_j d_ij, both expectations are polynomials in
// sums over the answers: O(m) for all A_i. Their sum is 0. The gradient of E[f] over sampled answers has the unbiased
// estimate sum_i n / (m - n) A_i grad log pi(y_i).
#pragma once

#include <cstdint>

#include "kernels/array.hpp"

namespace weft::kernels {

enum class SetObjective : int { product, additive };

struct SetRule {
  SetObjective objective = SetObjective::product;
  std::int64_t set_size = 4;      ///< n, at least 2
  double diversity_weight = 0.5;  ///< alpha, of the additive objective
};

/// Sums over the m answers of a prompt.
struct SetSums {
  std::int64_t count = 0;   ///< m
  double rewards = 0;       ///< sum_i R_i
  double pairs = 0;         ///< sum of d_ij over pairs i < j
  double reward_pairs = 0;  ///< sum_i R_i s_i
};

/// (n - k) / (m - k), a factor of the probability that k + 1 given answers are in the set; 0: there are not as many.
WEFT_HOST_DEVICE inline double set_ratio(double n, double m, double k) { return m > k ? (n - k) / (m - k) : 0.0; }

/// Factors that the rule and m alone determine: one division each, formed once per prompt.
struct SetFactors {
  double answers = 0, pairs = 0;          ///< 1 / m, and 1 / number of pairs of the m answers
  double set_answers = 0, set_pairs = 0;  ///< numbers of answers and pairs of a set
  double two = 0, three = 0;              ///< probability that two and three given answers are in the set
  /// Probability that one, two and three given answers are in a set that has answer i.
  double one_more = 0, two_more = 0, three_more = 0;
};

WEFT_HOST_DEVICE inline SetFactors set_factors(const SetRule& rule, std::int64_t count) {
  const double n = static_cast<double>(rule.set_size), m = static_cast<double>(count);
  SetFactors out;
  out.answers = count > 0 ? 1 / m : 0.0;
  out.pairs = count > 1 ? 2 / (m * (m - 1)) : 0.0;
  out.set_answers = 1 / n;
  out.set_pairs = 2 / (n * (n - 1));
  out.one_more = set_ratio(n, m, 1);
  out.two_more = out.one_more * set_ratio(n, m, 2);
  out.three_more = out.two_more * set_ratio(n, m, 3);
  out.two = n * out.answers * out.one_more;
  out.three = n * out.answers * out.two_more;
  return out;
}

/// D over all m answers; 0 for fewer than two.
WEFT_HOST_DEVICE inline double mean_distance(const SetFactors& factors, const SetSums& sums) {
  return sums.count < 2 ? 0.0 : sums.pairs * factors.pairs;
}

/// n / (m - n), the factor of A_i in the gradient. 0 where there are not more answers than the set has: all A_i are 0.
WEFT_HOST_DEVICE inline double gradient_factor(std::int64_t set_size, std::int64_t count) {
  return count > set_size ? static_cast<double>(set_size) / static_cast<double>(count - set_size) : 0.0;
}

/// E[f]; 0 if there are fewer answers than the set has.
WEFT_HOST_DEVICE inline double expected_objective(const SetRule& rule, const SetFactors& factors, const SetSums& sums) {
  if (sums.count < rule.set_size) return 0.0;
  if (rule.objective == SetObjective::additive)
    return sums.rewards * factors.answers + rule.diversity_weight * mean_distance(factors, sums);
  // Triples (reward of k, distance of i and j): k is one of the pair, or a third answer.
  return (factors.two * sums.reward_pairs + factors.three * (sums.pairs * sums.rewards - sums.reward_pairs)) *
         (factors.set_answers * factors.set_pairs);
}

/// A_i of an answer with reward R_i, s_i and q_i. 0 unless there are more answers than the set has.
WEFT_HOST_DEVICE inline double set_advantage(const SetRule& rule, const SetFactors& factors, const SetSums& sums,
                                             double reward, double s, double q) {
  if (sums.count <= rule.set_size) return 0.0;
  const double one = factors.one_more, two = factors.two_more, three = factors.three_more;
  double with = 0;
  if (rule.objective == SetObjective::additive) {
    with = (reward + one * (sums.rewards - reward)) * factors.set_answers +
           rule.diversity_weight * (one * s + two * (sums.pairs - s)) * factors.set_pairs;
  } else {
    const double own = reward * s + q;  // reward and distance have i in them, and one other answer
    const double other_pairs = sums.pairs - s, other_rewards = sums.rewards - reward, others = sums.reward_pairs - own;
    with = (one * own + two * (others + reward * other_pairs + s * other_rewards - q) +
            three * (other_pairs * other_rewards - others)) *
           (factors.set_answers * factors.set_pairs);
  }
  return with - expected_objective(rule, factors, sums);
}

}  // namespace weft::kernels
