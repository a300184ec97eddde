// SPDX-License-Identifier: Apache-2.0
//
// Means of what answers are worth, over prompts and ranks: the numbers of metrics.jsonl and samples.json.
#pragma once

#include <vector>

#include "polychromic/answers.hpp"
#include "run/trainable.hpp"

namespace weft::polychromic {

/// Sums and counts of measures of answers.
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
