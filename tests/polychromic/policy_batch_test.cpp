// SPDX-License-Identifier: Apache-2.0
//
// The policy gradient of whole small models: probabilities are those of the distribution that is sampled, and the
// expected gradient over all answers is the slope of the expected objective.
#include "polychromic/policy_batch.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <tuple>

#include "polychromic/advantage.hpp"
#include "polychromic/answer_measures.hpp"
#include "polychromic/answers.hpp"
#include "tests/language_model/small_model.hpp"
#include "tests/language_model/variants.hpp"

namespace weft::polychromic {

using namespace language_model;
namespace {

using weft::testing::gpt2;
using weft::testing::kLength;
using weft::testing::kSequences;
using weft::testing::llama;
using weft::testing::SmallModel;
using weft::testing::to_host;
using Gradients = std::vector<std::vector<float>>;

const AnswerIds kPrompt = {0, 2, 1};

/// A batch on a model, with what it takes.
struct Policy {
  Policy(SmallModel& model_, double temperature, std::int64_t micro_rows, std::int64_t vocabulary = 0, double top_p = 1)
      : model(model_),
        grid(weft::testing::world(), single_process()),
        arena(weft::testing::execution(), grid),
        batch({.sequences = 4,
               .length = kLength,
               .micro_rows = micro_rows,
               .vocabulary = vocabulary,
               .temperature = temperature,
               .top_p = top_p},
              weft::testing::execution(), arena),
        sink(model_.parameters(), weft::testing::execution(), kSequences * kLength),
        step(1) {}

  Gradients gradients(const std::vector<PolicyRow>& rows) {
    batch.fill(rows);
    sink.clear();
    model.transformer().prepare_weights();
    batch.add_gradients(model.transformer(), step.data(), sink, batch.passes());
    Gradients all;
    for (std::size_t i = 0; i < model.parameters().size(); ++i)
      all.push_back(to_host(model.parameters().specs()[i].is_matrix() ? sink.matrix(i).data : sink.vector(i).data,
                            model.parameters().specs()[i].elements()));
    return all;
  }

  SmallModel& model;
  parallel::Grid grid;
  model::StepArena arena;
  PolicyBatch batch;
  model::AccumulatingSink sink;
  device::Buffer<kernels::AdamStep> step;
};

double norm_of(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(sum);
}

/// log p of each token of the vocabulary after the text, in float64 from the logits of a forward pass.
std::vector<double> log_probabilities(SmallModel& model, AnswerIds text, double temperature) {
  const auto size = std::ssize(text);
  const device::Buffer<std::uint32_t> ids(size);
  const device::Buffer<std::int32_t> positions(size);
  std::vector<std::int32_t> order(text.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
  device::copy(weft::testing::execution(), ids.data(), text.data(), 4 * size, device::Direction::to_device);
  device::copy(weft::testing::execution(), positions.data(), order.data(), 4 * size, device::Direction::to_device);
  model.transformer().prepare_weights();
  model.transformer().forward({.sequences = 1,
                               .length = size,
                               .ids = {ids.data(), size},
                               .targets = {},
                               .positions = {positions.data(), size},
                               .first_key = {}},
                              nullptr);
  std::vector<double> values;
  double sum = 0;
  for (const float logit : model.transformer().logits(size - 1)) {
    values.push_back(static_cast<double>(logit) / temperature);
    sum += std::exp(values.back());
  }
  for (double& value : values) value -= std::log(sum);
  return values;
}

TransformerSettings three_tokens() {
  TransformerSettings settings = gpt2();
  settings.architecture.vocabulary = 3;
  return settings;
}

/// Three answers of one token: their rewards, and their distances.
constexpr std::array<double, 3> kRewards = {0.4, 1.0, 0.7};
constexpr double kDistances[3][3] = {{0, 1, 0.3}, {1, 0, 0.8}, {0.3, 0.8, 0}};
constexpr std::int64_t kSamples = 4;

/// each(outcomes of the samples, their probability): all 3^4 of them.
template <class Each>
void for_all_answers(const std::array<double, 3>& probabilities, const Each& each) {
  for (int code = 0; code < 81; ++code) {
    std::array<std::size_t, kSamples> outcome{};
    double probability = 1;
    for (int i = 0, rest = code; i < kSamples; ++i, rest /= 3) {
      outcome[static_cast<std::size_t>(i)] = static_cast<std::size_t>(rest % 3);
      probability *= probabilities[static_cast<std::size_t>(rest % 3)];
    }
    each(outcome, probability);
  }
}

PromptAdvantages advantages_of(const kernels::SetRule& rule, const std::array<std::size_t, kSamples>& outcome) {
  std::vector<double> rewards, distances;
  for (const std::size_t a : outcome) {
    rewards.push_back(kRewards[a]);
    for (const std::size_t b : outcome) distances.push_back(kDistances[a][b]);
  }
  return set_advantages(rule, rewards, distances);
}

}  // namespace

TEST_CASE("the expected gradient over all answers is the slope of the expected objective of sets") {
  for (const kernels::SetObjective objective : {kernels::SetObjective::product, kernels::SetObjective::additive})
    for (const double temperature : {0.9, 1.0, 2.5}) {
      CAPTURE(temperature);
      const kernels::SetRule rule{.objective = objective, .set_size = 2, .diversity_weight = 0.5};
      SmallModel model(three_tokens(), kSequences, kLength);
      Policy policy(model, temperature, kSequences * kLength);
      const auto probabilities = [&] {
        std::array<double, 3> values{};
        const std::vector<double> logs = log_probabilities(model, kPrompt, temperature);
        for (std::size_t i = 0; i < 3; ++i) values[i] = std::exp(logs[i]);
        return values;
      };
      const auto expected_objective = [&] {
        double sum = 0;
        for_all_answers(probabilities(), [&](const auto& outcome, double probability) {
          sum += probability * advantages_of(rule, outcome).objective;
        });
        return sum;
      };
      // The gradient is linear in the weights: one row for each outcome has those of all samples together.
      std::array<double, 3> weights{};
      for_all_answers(probabilities(), [&](const auto& outcome, double probability) {
        const PromptAdvantages advantages = advantages_of(rule, outcome);
        for (std::size_t i = 0; i < outcome.size(); ++i)
          weights[outcome[i]] +=
              probability * kernels::gradient_factor(rule.set_size, kSamples) * advantages.advantages[i];
      });
      const AnswerIds outcomes[] = {{0}, {1}, {2}};
      std::vector<PolicyRow> rows;
      for (std::size_t y = 0; y < 3; ++y) rows.push_back({kPrompt, outcomes[y], {static_cast<float>(weights[y])}});
      const Gradients gradients = policy.gradients(rows);
      int compared = 0;
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        const std::string parameter = model.parameters().specs()[i].name;
        CAPTURE(parameter);
        const double length = norm_of(gradients[i]);
        if (length < 1e-3) continue;  // below the rounding of the differences
        ++compared;
        const std::vector<float> at = model.get(i);
        const auto central = [&](double step) {
          double values[2] = {};
          for (const int side : {0, 1}) {
            std::vector<float> moved = at;
            for (std::size_t k = 0; k < at.size(); ++k)
              moved[k] -=
                  static_cast<float>((side == 1 ? step : -step) * static_cast<double>(gradients[i][k]) / length);
            model.set(i, moved);
            values[side] = expected_objective();
          }
          return (values[1] - values[0]) / (2 * step);
        };
        // Extrapolated to step 0, as for the loss (transformer_test.cpp): rounding is 1e-7 / step.
        constexpr double kStep = 1e-2;
        const double slope = (4 * central(kStep) - central(2 * kStep)) / 3;
        model.set(i, at);
        CHECK(slope == doctest::Approx(length).epsilon(0.01 + 5e-5 / length));
      }
      CHECK(compared > 10);
    }
}

TEST_CASE("with top_p the gradient is that of the truncated distribution: of the kept tokens alone") {
  // Small steps do not change which of the three tokens are kept: the slope is that of log p_K.
  constexpr double kTemperature = 0.9;
  SmallModel model(three_tokens(), kSequences, kLength);
  const std::vector<double> logs = log_probabilities(model, kPrompt, kTemperature);
  std::array<std::uint32_t, 3> order = {0, 1, 2};
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return logs[a] > logs[b]; });
  const double first = std::exp(logs[order[0]]), second = std::exp(logs[order[1]]);
  Policy policy(model, kTemperature, kSequences * kLength, 0, first + second / 2);
  const auto log_kept = [&] {
    const std::vector<double> now = log_probabilities(model, kPrompt, kTemperature);
    return now[order[0]] - std::log(std::exp(now[order[0]]) + std::exp(now[order[1]]));
  };
  const AnswerIds answer = {order[0]}, outside = {order[2]};
  const Gradients gradients = policy.gradients({{kPrompt, answer, {1.0f}}});
  CHECK(static_cast<double>(policy.batch.log_probabilities()[0][0]) == doctest::Approx(log_kept()).epsilon(1e-5));
  int compared = 0;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const double length = norm_of(gradients[i]);
    if (length < 1e-2) continue;
    ++compared;
    const std::vector<float> at = model.get(i);
    double values[2] = {};
    constexpr double kStep = 3e-3;
    for (const int side : {0, 1}) {
      std::vector<float> moved = at;
      for (std::size_t k = 0; k < at.size(); ++k)
        moved[k] -= static_cast<float>((side == 1 ? kStep : -kStep) * static_cast<double>(gradients[i][k]) / length);
      model.set(i, moved);
      values[side] = log_kept();
    }
    model.set(i, at);
    CHECK((values[1] - values[0]) / (2 * kStep) == doctest::Approx(length).epsilon(0.02));
  }
  CHECK(compared > 5);
  // A token that another rounding has drawn counts in any case.
  policy.gradients({{kPrompt, outside, {1.0f}}});
  CHECK(static_cast<double>(policy.batch.log_probabilities()[0][0]) == doctest::Approx(logs[order[2]]).epsilon(1e-5));
}

TEST_CASE("answers are drawn with the adapters of the moment, and trained without their dropout") {
  TransformerSettings settings = llama();
  settings.architecture.lora = {.rank = 2, .alpha = 4, .targets = {"query", "value", "down"}};
  settings.architecture.lora.dropout = 0.3;
  SmallModel model(settings, kSequences, kLength);
  const parallel::Grid grid(weft::testing::world(), single_process());
  model::StepArena arena(weft::testing::execution(), grid);
  run::Timers timers;
  Generator generator({.architecture = settings.architecture,
                       .rows = 4,
                       .prompts = 1,
                       .longest_prompt = 3,
                       .new_tokens = 5,
                       .temperature = 0.9,
                       .top_p = 0.95},
                      model.transformer(), weft::testing::execution(), timers, arena);
  Policy policy(model, 0.9, kSequences * kLength, 0, 0.95);
  Prompt prompt;
  prompt.ids = kPrompt;
  std::vector<std::vector<std::vector<float>>> drawn;
  for (const float factor : {1.0f, -0.5f}) {
    CAPTURE(factor);
    for (std::size_t i = 0; i < model.parameters().size(); ++i)
      if (model.parameters().specs()[i].name.find("lora_b") != std::string::npos) {
        std::vector<float> values = model.get(i);
        for (float& value : values) value *= factor;
        model.set(i, values);
      }
    const Answers answers = draw_answers(generator, Tokenizer::bytes({}), {prompt}, 4, 7, 3, 1)[0];
    std::vector<PolicyRow> rows;
    for (const AnswerIds& answer : answers.drawn) rows.push_back({kPrompt, answer, std::vector<float>(5, 1.0f)});
    policy.batch.fill(rows);
    model.transformer().prepare_weights();
    policy.batch.add_gradients(model.transformer(), policy.step.data(), policy.sink, policy.batch.passes());
    const auto trained = policy.batch.log_probabilities();
    for (std::size_t r = 0; r < rows.size(); ++r)
      for (std::size_t t = 0; t < 5; ++t)
        CHECK(trained[r][t] == doctest::Approx(answers.log_drawn[r][t]).epsilon(1e-4));
    // Ratios of probabilities are those of two forward passes of training: 1 while the weights are the same.
    policy.batch.score(model.transformer());
    CHECK(policy.batch.log_probabilities() == trained);
    drawn.push_back(answers.log_drawn);
  }
  CHECK(drawn[0] != drawn[1]);
}

TEST_CASE("pass@k is the share of sets of k answers with a right one") {
  for (const int right : {0, 1, 3, 5})
    for (const int k : {1, 2, 5}) {
      int sets = 0, passed = 0;
      for (unsigned set = 0; set < 1u << 5; ++set) {
        if (std::popcount(set) != k) continue;
        ++sets;
        passed += (set & ((1u << right) - 1)) != 0;
      }
      CHECK(pass_at(5, right, k) == doctest::Approx(static_cast<double>(passed) / sets));
    }
  CHECK(std::isnan(pass_at(7, 3, 8)));
}

TEST_CASE("advantages of groups: GRPO, leave one out, the best of N") {
  const std::vector<double> rewards = {1, 0, 0.5, 9, 0.5};
  const std::vector<char> present = {1, 1, 1, 0, 1}, all(5, 1), one = {0, 1, 0, 0, 0};
  const auto of = [&](Objective objective, bool standardise) {
    return group_advantages(objective, standardise, rewards, present);
  };
  const PromptAdvantages centred = of(Objective::grpo, false), scaled = of(Objective::grpo, true),
                         others = of(Objective::rloo, true), best = of(Objective::best_of_n, true);
  CHECK(centred.advantages == std::vector<double>{0.5, -0.5, 0, 0, 0});  // the empty answer has no part
  CHECK(centred.counted == 4);
  CHECK(centred.objective == 0.5);
  const double deviation = std::sqrt(0.5 / 4);
  CHECK(scaled.advantages[0] == doctest::Approx(0.5 / deviation));
  CHECK(others.advantages[0] == doctest::Approx(1 - (0 + 0.5 + 0.5) / 3));
  CHECK(best.advantages == std::vector<double>{1, 0, 0, 0, 0});
  CHECK(of(Objective::supervised, true).advantages == std::vector<double>(5));
  for (const Objective objective : {Objective::grpo, Objective::rloo, Objective::best_of_n}) {
    // Equal rewards, of a size whose mean is rounded, and a single answer: nothing to prefer.
    const std::vector<double> equal(5, 0.1);
    CHECK(group_advantages(objective, true, equal, all).advantages == std::vector<double>(5));
    CHECK(group_advantages(objective, true, rewards, one).advantages == std::vector<double>(5));
    CHECK(group_advantages(objective, true, rewards, std::vector<char>(5)).counted == 0);
  }
  // Sets: equal answers with equal rewards, and a prompt that has fewer answers than a set.
  for (const kernels::SetObjective objective : {kernels::SetObjective::product, kernels::SetObjective::additive}) {
    const kernels::SetRule rule{.objective = objective, .set_size = 3, .diversity_weight = 0.5};
    const std::vector<double> equal(5, 0.1), none(25);
    for (const double advantage : set_advantages(rule, equal, none).advantages) CHECK(std::abs(advantage) <= 1e-16);
    CHECK(set_advantages(rule, rewards, std::vector<double>(25, 1), one).advantages == std::vector<double>(5));
  }
  Settings settings;
  CHECK(advantage_factor(settings, 8) == kernels::gradient_factor(4, 8));
  settings.objective = Objective::rloo;
  CHECK(advantage_factor(settings, 4) == 0.25);
  CHECK(advantage_factor(settings, 0) == 0);
}

TEST_CASE("empty and cut answers are counted; a cut answer has its reward") {
  Answers answers;
  answers.ids = {{1, 2}, {}, {3}};
  answers.ended = {1, 1, 0};
  Judgement judgement;
  judgement.rewards = {0, 0, 1};
  judgement.text = text_diversity(answers.ids);
  AnswerMeasures measures;
  measures.add(answers, judgement);
  const auto third = doctest::Approx(1.0 / 3);
  for (const AnswerMeasures::Measure share :
       {AnswerMeasures::empty, AnswerMeasures::cut, AnswerMeasures::reward, AnswerMeasures::pass_1})
    CHECK(measures.mean(share) == third);
  CHECK(measures.mean(AnswerMeasures::length) == 1.5);
}

TEST_CASE("probabilities of answers are those of the tempered softmax, whatever the lengths beside them") {
  TransformerSettings capped = llama();
  capped.architecture.model.logit_softcap = 2;
  for (const TransformerSettings& settings : {gpt2(), llama(), capped}) {
    SmallModel model(settings, kSequences, kLength);
    const AnswerIds prompts[] = {{3}, {4, 5, 6, 7}, {1, 2}}, answers[] = {{7, 1, 4}, {28, 0}, {9, 9, 3, 1, 2, 8}};
    for (const double temperature : {0.7, 1.0, 1.6}) {
      Policy whole(model, temperature, kSequences * kLength), pieces(model, temperature, kLength);
      std::vector<PolicyRow> rows;
      for (std::size_t r = 0; r < 3; ++r) {
        std::vector<float> weights(answers[r].size());
        for (std::size_t t = 0; t < weights.size(); ++t) weights[t] = 0.1f * static_cast<float>(t + r) - 0.2f;
        rows.push_back({prompts[r], answers[r], weights});
      }
      const Gradients gradients = whole.gradients(rows), in_pieces = pieces.gradients(rows);
      const auto found = whole.batch.log_probabilities(), again = pieces.batch.log_probabilities();
      // Without a change of the weights the ratio of probabilities is 1 in all bits.
      whole.batch.score(model.transformer());
      CHECK(whole.batch.log_probabilities() == found);
      pieces.batch.score(model.transformer());
      CHECK(pieces.batch.log_probabilities() == again);
      for (std::size_t r = 0; r < 3; ++r) {
        AnswerIds text = prompts[r];
        REQUIRE(found[r].size() == answers[r].size());
        for (std::size_t t = 0; t < answers[r].size(); ++t) {
          const double exact = log_probabilities(model, text, temperature)[answers[r][t]];
          // Logits in fp32, of size 10.
          CHECK(static_cast<double>(found[r][t]) == doctest::Approx(exact).epsilon(1e-5));
          CHECK(again[r][t] == doctest::Approx(found[r][t]).epsilon(1e-5));
          text.push_back(answers[r][t]);
        }
      }
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < gradients.size(); ++i)
        for (std::size_t k = 0; k < gradients[i].size(); ++k) {
          difference += std::pow(static_cast<double>(gradients[i][k]) - static_cast<double>(in_pieces[i][k]), 2);
          size += std::pow(static_cast<double>(gradients[i][k]), 2);
        }
      CHECK(size > 1e-4);
      CHECK(std::sqrt(difference / size) <= 1e-5);  // rounding of sums in fp32
      // Tokens of the prompt have no part.
      for (PolicyRow& row : rows) std::fill(row.weights.begin(), row.weights.end(), 0.0f);
      for (const std::vector<float>& zero : whole.gradients(rows)) CHECK(norm_of(zero) == 0);
    }
  }
}

TEST_CASE("answers have the probabilities with which they were drawn") {
  // Also where the tokeniser has fewer ids than the model: others have no probability.
  const std::int64_t all = gpt2().architecture.vocabulary;
  for (const auto& [temperature, vocabulary, top_p] : std::initializer_list<std::tuple<double, std::int64_t, double>>{
           {0.6, 0, 1}, {1.0, 0, 1}, {1.0, all / 2, 1}, {0.9, 0, 0.9}, {0.6, all / 2, 0.8}}) {
    CAPTURE(top_p);
    SmallModel model(gpt2(), kSequences, kLength);
    const parallel::Grid grid(weft::testing::world(), single_process());
    model::StepArena arena(weft::testing::execution(), grid);
    run::Timers timers;
    const GenerationSettings settings{.architecture = gpt2().architecture,
                                      .rows = 4,
                                      .prompts = 2,
                                      .vocabulary = vocabulary,
                                      .longest_prompt = 3,
                                      .new_tokens = 5,
                                      .temperature = temperature,
                                      .top_p = top_p};
    Generator generator(settings, model.transformer(), weft::testing::execution(), timers, arena);
    const Tokenizer tokenizer = Tokenizer::bytes({});
    Prompt first, second;
    first.ids = kPrompt;
    second.ids = {5, 4};
    const std::vector<Answers> answers = draw_answers(generator, tokenizer, {first, second}, 2, 7, 3, 1);
    Policy policy(model, temperature, kSequences * kLength, vocabulary, top_p);
    std::vector<PolicyRow> rows;
    for (const Answers& of_prompt : answers)
      for (const AnswerIds& answer : of_prompt.drawn) {
        REQUIRE(answer.size() == 5);
        for (const std::uint32_t id : answer) CHECK(id < (vocabulary == 0 ? all : vocabulary));
        rows.push_back({of_prompt.prompt.ids, answer, std::vector<float>(5, 1.0f)});
      }
    policy.gradients(rows);
    const auto trained = policy.batch.log_probabilities();
    for (std::size_t r = 0; r < rows.size(); ++r)
      for (std::size_t t = 0; t < 5; ++t)
        CHECK(trained[r][t] == doctest::Approx(answers[r / 2].log_drawn[r % 2][t]).epsilon(1e-4));
    // Others for another prompt, sample and step; the same for the same.
    CHECK(answers[0].drawn[0] != answers[0].drawn[1]);
    CHECK(draw_answers(generator, tokenizer, {second}, 2, 7, 3, 2)[0].drawn == answers[1].drawn);
    CHECK(draw_answers(generator, tokenizer, {second}, 2, 7, 4, 2)[0].drawn != answers[1].drawn);
    // An answer ends before a stop text. The token that completed it was drawn, so it counts in the gradient.
    const AnswerIds& whole = answers[0].drawn[0];
    const std::string stop = tokenizer.detokenise({&whole[2], 1});
    const Answers stopped = draw_answers(generator, tokenizer, {first, second}, 2, 7, 3, 1, {&stop, 1})[0];
    const auto end = std::find(whole.begin(), whole.end(), whole[2]);
    CHECK(stopped.drawn[0] == AnswerIds(whole.begin(), end + 1));
    CHECK(stopped.ids[0] == AnswerIds(whole.begin(), end));
    CHECK(stopped.ended[0] == 1);
    CHECK(answers[0].ended == std::vector<char>{0, 0});  // cut by new_tokens
  }
}

}  // namespace weft::polychromic
