// SPDX-License-Identifier: Apache-2.0
//
// Means of what answers are worth, over prompts and ranks: the numbers of metrics.jsonl and samples.json.
#pragma once

#include <vector>

#include "polychromic/answers.hpp"
#include "run/trainable.hpp"

namespace weft::polychromic {

/// Probability that of k of n answers, of which `right` are right, at least one is: 1 - C(n - right, k) / C(n, k)
/// (Chen et al. 2021). NaN for k > n.
double pass_at(std::int64_t n, std::int64_t right, std::int64_t k);

/// Sums and counts of measures of answers. An answer is right if its reward is at least 1.
class AnswerMeasures {
 public:
  enum Measure {
    reward,
    diversity,
    objective,
    distinct_2,
    self_bleu,
    length,
    empty,
    cut,
    unique,  // share of different answers
    pass_1,
    pass_8,
    pass_64,
    advantage_square,  // the following are of training only
    gap,
    clipped,
    divergence,
    kCount
  };

  AnswerMeasures() : numbers_(2 * kCount) {}
  void add(Measure, double value);  ///< NaN: not defined, not counted
  void add(const Answers&, const Judgement&);
  /// Sums measures over all ranks. Collective.
  void sum_over(const parallel::Communicator& ranks) { ranks.sum(std::span<double>(numbers_)); }
  double mean(Measure) const;  ///< NaN: of nothing

  /// Metrics of the batches of training: "answers.reward" and so on, every measure.
  run::Metrics of_training() const;
  /// Metrics of an evaluation: "validation.reward" and so on.
  run::Metrics of_evaluation() const;
  /// The measures under their names without a prefix; null where not defined.
  Json to_json() const;

 private:
  std::vector<double> numbers_;
};

}  // namespace weft::polychromic
