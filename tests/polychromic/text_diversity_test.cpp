// SPDX-License-Identifier: Apache-2.0
//
// Metrics on token ids: published and hand-calculated values, and what they do not depend on. Advantages from distances
// of pairs. The gradient that the advantages stand for, on a policy that is small enough to enumerate.
#include "polychromic/text_diversity.hpp"

#include <cmath>

#include "kernels/language/diversity/set_advantages.hpp"
#include "kernels/random.hpp"
#include "polychromic/advantage.hpp"
#include "tests/kernels/language/set_reference.hpp"
#include "tests/kernels/support.hpp"

namespace weft::polychromic {

namespace {

using kernels::SetObjective;
using kernels::SetRule;
using testing::DeviceArray;

std::vector<AnswerIds> random_answers(std::size_t count, std::uint64_t stream) {
  std::vector<AnswerIds> answers(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto length = kernels::philox(stream, kernels::Purpose::test, 0, i).word[0] % 9;
    for (std::uint64_t t = 0; t < length; ++t)
      answers[i].push_back(kernels::philox(stream, kernels::Purpose::test, i + 1, t).word[0] % 4);
  }
  return answers;
}

bool near(double value, double expected, double tolerance = 1e-15) { return std::abs(value - expected) <= tolerance; }

TEST_CASE("distinct-n") {
  const std::vector<AnswerIds> two = {{1, 2, 3}, {1, 2, 4}};
  CHECK(distinct(two, 2) == 0.75);  // published
  CHECK(distinct(two, 1) == 4.0 / 6);
  CHECK(distinct(two, 3) == 1);
  CHECK(mean_distinct(two, 2) == 1);
  // 1 1 1 1: one unigram of 4, one bigram of 3, one trigram of 2; {7} has no bigram and does not count for them.
  const std::vector<AnswerIds> repeated = {{1, 1, 1, 1}, {7}, {}};
  CHECK(distinct(repeated, 1) == 2.0 / 5);
  CHECK(distinct(repeated, 2) == 1.0 / 3);
  CHECK(distinct(repeated, 3) == 0.5);
  CHECK(mean_distinct(repeated, 1) == (0.25 + 1) / 2);
  CHECK(mean_distinct(repeated, 2) == 1.0 / 3);
  // Token ids are whole words: 1 and 65537 differ.
  CHECK(distinct(std::vector<AnswerIds>{{1, 65537}}, 1) == 1);
  CHECK(std::isnan(distinct(std::vector<AnswerIds>{{1}, {}}, 2)));
  CHECK(std::isnan(mean_distinct(std::vector<AnswerIds>{}, 1)));
}

TEST_CASE("BLEU-2, by hand") {
  const auto bleu = [](const AnswerIds& answer, const std::vector<AnswerIds>& references) {
    return bleu2(answer, references);
  };
  CHECK(bleu({1, 2, 3}, {{1, 2, 3}}) == 1);
  // p_1 = 2/3, p_2 = (1 + 1) / (2 + 1).
  CHECK(near(bleu({1, 2, 3}, {{1, 2, 4}}), 2.0 / 3));
  // Each match counts as often as in one reference: p_1 = 1/3, p_2 = (0 + 1) / (2 + 1). Longer than the reference.
  CHECK(near(bleu({1, 1, 1}, {{1, 2}}), 1.0 / 3));
  // The most over the references, not their sum: p_1 = 2/3, p_2 = (1 + 1) / (2 + 1).
  CHECK(near(bleu({1, 1, 1}, {{1, 2, 1}, {1, 1, 9}}), 2.0 / 3));
  // Brevity: c = 2, r = 4.
  CHECK(near(bleu({1, 2}, {{1, 2, 3, 4}}), std::exp(-1.0)));
  // References of 2 and 4 tokens are equally close to 3: the shorter counts, no penalty. p_1 = 1, p_2 = 1.
  CHECK(bleu({1, 2, 3}, {{1, 2}, {1, 2, 3, 4}}) == 1);
  // The closest is 6: exp(1 - 6/5). p_1 = 1, p_2 = 1.
  CHECK(near(bleu({1, 2, 3, 4, 5}, {{1}, {1, 2, 3, 4, 5, 6}}), std::exp(-0.2)));
  CHECK(bleu({5}, {{5}}) == 1);
  CHECK(bleu({5}, {{6}}) == 0);
}

TEST_CASE("self-BLEU is the mean of BLEU-2 against all others") {
  CHECK(near(self_bleu(std::vector<AnswerIds>{{1, 2, 3}, {1, 2, 4}}), 2.0 / 3));
  CHECK(std::isnan(self_bleu(std::vector<AnswerIds>{{1, 2, 3}, {}})));
  for (std::uint64_t stream = 0; stream < 40; ++stream) {
    std::vector<AnswerIds> answers = random_answers(2 + stream % 7, stream);
    std::erase_if(answers, [](const AnswerIds& answer) { return answer.empty(); });
    if (answers.size() < 2) continue;
    double sum = 0;
    for (std::size_t i = 0; i < answers.size(); ++i) {
      std::vector<AnswerIds> others = answers;
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
      sum += bleu2(answers[i], others);
    }
    const double expected = sum / static_cast<double>(answers.size());
    CHECK(near(self_bleu(answers), expected, 1e-14));
    // Neither order nor empty answers matter.
    std::vector<AnswerIds> reversed(answers.rbegin(), answers.rend());
    reversed.emplace_back();
    CHECK(near(self_bleu(reversed), expected, 1e-14));
  }
}

TEST_CASE("the metrics of a prompt count empty answers and leave them out") {
  const std::vector<AnswerIds> answers = {{1, 2, 3}, {}, {1, 2, 4}, {1, 2, 3}, {}};
  const TextDiversity all = text_diversity(answers);
  CHECK(all.answers == 5);
  CHECK(all.empty == 2);
  CHECK(all.unique == 2);
  CHECK(all.mean_length == 3);
  CHECK(all.distinct[1] == 3.0 / 6);
  CHECK(near(all.self_bleu, (1 + 2.0 / 3 + 1) / 3));
  const Json json = to_json(all);
  CHECK(json["distinct_2"] == all.distinct[1]);
  CHECK(json["mean_distinct_3"] == all.mean_distinct[2]);
  const TextDiversity none = text_diversity(std::vector<AnswerIds>{{}, {}});
  CHECK(none.empty == 2);
  CHECK(none.unique == 0);
  CHECK(std::isnan(none.mean_length));
}

TEST_CASE("distances of pairs, and their advantages against all sets") {
  for (const PairMetric metric : {PairMetric::distinct, PairMetric::self_bleu}) {
    std::vector<AnswerIds> answers = random_answers(8, 77);
    answers[3].clear();
    const std::vector<double> distances = pair_distances(metric, answers);
    std::vector<char> present;
    std::vector<double> rewards, kept_distances, kept_rewards;
    for (std::size_t i = 0; i < answers.size(); ++i) {
      present.push_back(answers[i].empty() ? 0 : 1);
      rewards.push_back(std::sin(static_cast<double>(i)));
      CHECK(distances[i * 8 + i] == 0);
      for (std::size_t j = 0; j < 8; ++j) {
        CHECK(distances[i * 8 + j] == distances[j * 8 + i]);
        CHECK(distances[i * 8 + j] >= 0);
        CHECK(distances[i * 8 + j] <= 1);
        if (!answers[i].empty() && !answers[j].empty()) kept_distances.push_back(distances[i * 8 + j]);
      }
      if (!answers[i].empty()) kept_rewards.push_back(rewards.back());
    }
    for (const SetObjective objective : {SetObjective::product, SetObjective::additive})
      for (const std::int64_t n : {2, 3, 4}) {
        const SetRule rule{objective, n, 0.25};
        const PromptAdvantages result = set_advantages(rule, rewards, distances, present);
        const testing::SetReference reference = testing::all_sets(rule, kept_rewards, kept_distances);
        CHECK(result.counted == std::ssize(kept_rewards));
        CHECK(near(result.objective, reference.objective, 1e-12));
        double sum = 0;
        for (std::size_t i = 0, kept = 0; i < answers.size(); ++i) {
          sum += result.advantages[i];
          if (present[i] == 0)
            CHECK(result.advantages[i] == 0);
          else
            CHECK(near(result.advantages[i], reference.advantages[kept++], 1e-12));
        }
        CHECK(near(sum, 0, 1e-12));
      }
  }
  const std::vector<AnswerIds> equal = {{1}, {1}, {2}};
  CHECK(pair_distances(PairMetric::distinct, equal) == std::vector<double>{0, 0, 1, 0, 0, 1, 1, 1, 0});
  CHECK(pair_distances(PairMetric::self_bleu, equal) == std::vector<double>{0, 0, 1, 0, 0, 1, 1, 1, 0});
}

TEST_CASE("the closed form from embeddings equals that from distances") {
  const std::int64_t samples = 9, columns = 20;
  const std::vector<float> rows = testing::random_floats(samples * columns, 21);
  const std::vector<float> values = testing::random_floats(samples, 22);
  const std::vector<double> rewards(values.begin(), values.end());
  const std::vector<double> distances = testing::cosine_distances(rows, static_cast<std::size_t>(columns));
  const PromptAdvantages host = set_advantages({}, rewards, distances);
  const testing::SetReference reference = testing::all_sets({}, rewards, distances);
  for (std::size_t i = 0; i < rewards.size(); ++i) CHECK(near(host.advantages[i], reference.advantages[i], 1e-12));
  const std::vector<double> own = cosine_distances({rows.data(), samples, columns, columns});
  REQUIRE(own.size() == distances.size());
  for (std::size_t pair = 0; pair < own.size(); ++pair) CHECK(near(own[pair], distances[pair], 1e-12));
}

TEST_CASE("distances of embeddings: opposite, orthogonal, and none with an empty answer") {
  const std::vector<float> rows = {2, 0, -1, 0, 0, 3, 0, 0};
  const std::vector<double> expected = {0, 2, 1, 0, 2, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0};
  CHECK(cosine_distances({rows.data(), 4, 2, 2}) == expected);
}

// --- Gradient -------------------------------------------------------------------------------------------------------

/// A policy with three outcomes, softmax(logits). Each outcome is an answer with an embedding and a reward.
constexpr std::size_t kOutcomes = 3, kSamples = 4;
using Logits = std::array<double, kOutcomes>;
const std::vector<float> kEmbeddings = {1, 0, 0.6f, 0.8f, -0.5f, 1};  // [outcomes, 2]
constexpr double kRewards[kOutcomes] = {1, 0.4, 0.7};
constexpr Logits kLogits = {0.3, -0.5, 0.9};

Logits probabilities(const Logits& logits) {
  Logits p;
  double total = 0;
  for (std::size_t a = 0; a < kOutcomes; ++a) total += p[a] = std::exp(logits[a]);
  for (double& value : p) value /= total;
  return p;
}

/// E[f] over sets of two independent draws, by enumeration.
double expected(const SetRule& rule, const Logits& logits) {
  const std::vector<double> distances = testing::cosine_distances(kEmbeddings, 2);
  const Logits p = probabilities(logits);
  double sum = 0;
  for (std::size_t a = 0; a < kOutcomes; ++a)
    for (std::size_t b = 0; b < kOutcomes; ++b) {
      const double reward = (kRewards[a] + kRewards[b]) / 2, distance = distances[a * kOutcomes + b];
      sum += p[a] * p[b] *
             (rule.objective == SetObjective::product ? reward * distance : reward + rule.diversity_weight * distance);
    }
  return sum;
}

/// Advantages of all 3^4 batches of samples, each a prompt of one call. [batches * samples]
struct Batches {
  std::vector<std::array<std::size_t, kSamples>> outcomes;
  std::vector<double> advantages;
};
Batches all_batches(const kernels::Execution& execution, const SetRule& rule) {
  Batches all;
  std::vector<float> rows;
  std::vector<double> rewards;
  for (std::size_t number = 0; number < 81; ++number) {
    all.outcomes.emplace_back();
    for (std::size_t i = 0, rest = number; i < kSamples; ++i, rest /= kOutcomes) {
      const std::size_t a = all.outcomes.back()[i] = rest % kOutcomes;
      rows.insert(rows.end(), kEmbeddings.begin() + static_cast<std::ptrdiff_t>(2 * a),
                  kEmbeddings.begin() + static_cast<std::ptrdiff_t>(2 * a + 2));
      rewards.push_back(kRewards[a]);
    }
  }
  const std::int64_t prompts = std::ssize(all.outcomes), count = std::ssize(rewards);
  const testing::TestMatrix embeddings(rows, count, 2, kernels::Scalar::fp32);
  const DeviceArray<double> device_rewards(rewards), workspace(kernels::set_advantages_workspace(prompts, kSamples)),
      diversity(prompts), objective(prompts), distances(count), advantages(count);
  const DeviceArray<std::int64_t> counts(prompts);
  kernels::set_advantages(
      execution, rule, {prompts, kSamples, embeddings.view(), {device_rewards.data(), count}}, workspace.array(),
      {counts.array(), diversity.array(), objective.array(), distances.array(), advantages.array()});
  kernels::fence(execution);
  all.advantages = advantages.values();
  return all;
}

/// Expectation of sum_i n / (m - n) A_i grad log pi(y_i) over all batches.
Logits expected_gradient(const Batches& all, const SetRule& rule, const Logits& logits) {
  const Logits p = probabilities(logits);
  Logits gradient{};
  for (std::size_t batch = 0; batch < all.outcomes.size(); ++batch) {
    double probability = 1;
    for (const std::size_t a : all.outcomes[batch]) probability *= p[a];
    for (std::size_t i = 0; i < kSamples; ++i)
      for (std::size_t k = 0; k < kOutcomes; ++k)
        gradient[k] += probability * kernels::gradient_factor(rule.set_size, kSamples) *
                       all.advantages[batch * kSamples + i] * ((all.outcomes[batch][i] == k ? 1.0 : 0.0) - p[k]);
  }
  return gradient;
}

TEST_CASE("the expected gradient of the sampled objective is that of the objective") {
  testing::for_each_backend([&](const kernels::Execution& execution) {
    for (const SetObjective objective : {SetObjective::product, SetObjective::additive}) {
      const SetRule rule{objective, 2, 0.5};
      const Logits gradient = expected_gradient(all_batches(execution, rule), rule, kLogits);
      for (std::size_t k = 0; k < kOutcomes; ++k) {
        constexpr double kStep = 1e-4;  // errors: kStep^2 and 1e-16 / kStep
        Logits up = kLogits, down = kLogits;
        up[k] += kStep;
        down[k] -= kStep;
        CHECK(near(gradient[k], (expected(rule, up) - expected(rule, down)) / (2 * kStep), 1e-6));
        CHECK(std::abs(gradient[k]) > 1e-3);
      }
    }
  });
}

}  // namespace
}  // namespace weft::polychromic
