// SPDX-License-Identifier: Apache-2.0
#include "polychromic/answer_measures.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

namespace weft::polychromic {
namespace {

/// Names in metrics.jsonl, in the order of AnswerMeasures::Measure.
constexpr std::array<const char*, AnswerMeasures::kCount> kMeasureNames = {
    "reward",           "diversity",           "objective",      "distinct_2", "self_bleu", "answer_tokens",
    "empty_answers",    "cut_answers",         "unique_answers", "pass_1",     "pass_8",    "pass_64",
    "advantage_spread", "log_probability_gap", "clipped",        "divergence"};
constexpr int kEvaluated = AnswerMeasures::advantage_square;

}  // namespace

double pass_at(std::int64_t n, std::int64_t right, std::int64_t k) {
  if (k > n) return std::numeric_limits<double>::quiet_NaN();
  double none = 1;  // of the k
  for (std::int64_t i = 0; i < k; ++i)
    none *= static_cast<double>(std::max<std::int64_t>(0, n - right - i)) / static_cast<double>(n - i);
  return 1 - none;
}

void AnswerMeasures::add(Measure measure, double value) {
  if (std::isnan(value)) return;
  numbers_[static_cast<std::size_t>(measure)] += value;
  numbers_[static_cast<std::size_t>(kCount + measure)] += 1;
}

void AnswerMeasures::add(const Answers& answers, const Judgement& judgement) {
  for (const double value : judgement.rewards) add(reward, value);
  for (const AnswerIds& ids : answers.ids) add(empty, ids.empty() ? 1 : 0);
  for (const char one : answers.ended) add(cut, one == 0 ? 1 : 0);
  const std::int64_t count = std::ssize(judgement.rewards);
  const std::int64_t right =
      std::count_if(judgement.rewards.begin(), judgement.rewards.end(), [](double value) { return value >= 1; });
  for (const auto& [measure, k] : {std::pair{pass_1, 1}, {pass_8, 8}, {pass_64, 64}})
    add(measure, pass_at(count, right, k));
  if (count > 0) add(unique, static_cast<double>(judgement.text.unique) / static_cast<double>(count));
  add(diversity, judgement.semantic);
  add(objective, judgement.advantages.objective);
  add(distinct_2, judgement.text.distinct[1]);
  add(self_bleu, judgement.text.self_bleu);
  add(length, judgement.text.mean_length);
  for (const double value : judgement.advantages.advantages) add(advantage_square, value * value);
}

double AnswerMeasures::mean(Measure measure) const {
  const double count = numbers_[static_cast<std::size_t>(kCount + measure)];
  if (count == 0) return std::numeric_limits<double>::quiet_NaN();
  return numbers_[static_cast<std::size_t>(measure)] / count;
}

run::Metrics AnswerMeasures::of_training() const {
  run::Metrics metrics;
  for (int i = 0; i < kCount; ++i) {
    const auto measure = static_cast<Measure>(i);
    double value = mean(measure);
    if (measure == advantage_square) value = std::sqrt(value);
    metrics.push_back({.name = std::string("answers.") + kMeasureNames[static_cast<std::size_t>(i)],
                       .value = value,
                       .progress = measure == diversity ? "diversity {:.4f}" : "",
                       .in_result = true,
                       .optional = true});
  }
  return metrics;
}

run::Metrics AnswerMeasures::of_evaluation() const {
  run::Metrics metrics;
  for (int i = 0; i < kEvaluated; ++i)
    metrics.push_back({.name = std::string("validation.") + kMeasureNames[static_cast<std::size_t>(i)],
                       .value = mean(static_cast<Measure>(i)),
                       .optional = true});
  return metrics;
}

Json AnswerMeasures::to_json() const {
  Json json;
  for (int i = 0; i < kEvaluated; ++i) {
    const double value = mean(static_cast<Measure>(i));
    json[kMeasureNames[static_cast<std::size_t>(i)]] = std::isnan(value) ? Json() : Json(value);
  }
  return json;
}

}  // namespace weft::polychromic
