// SPDX-License-Identifier: Apache-2.0
//
// Answers are drawn from the distribution that is trained: in fp32 the log-probability of a drawn token in generation,
// from a cache and in few rows, has all bits of that in the forward pass of training, over whole answers.
#include <bit>
#include <cmath>

#include "polychromic/answers.hpp"
#include "polychromic/policy_batch.hpp"
#include "tests/language_model/small_model.hpp"
#include "tests/language_model/variants.hpp"

namespace weft::polychromic {

using namespace language_model;
namespace {

using weft::testing::SmallModel;

// Keys and values of several tiles of the attention, on both sides of a border; answers to a short prompt too.
constexpr std::int64_t kText = 96, kNew = 24, kTogether = 3;
constexpr std::size_t kSamples = 3;
/// Spacing of bf16 from 16 on, where the largest logits of these models are: of a logit and of the sum, in each of the
/// two passes. Hidden states of other roundings move a logit by as much (largest difference 0.06 on a host, 0.30 on an
/// H200).
constexpr float kRounding = 4 * 0x1p-3f;

/// The variants of the architecture with longer texts, and models whose sums have several blocks.
std::vector<std::pair<std::string, TransformerSettings>> models() {
  std::vector<std::pair<std::string, TransformerSettings>> all = weft::testing::variants();
  for (const TransformerSettings& base : {weft::testing::gpt2(), weft::testing::llama()}) {
    TransformerSettings wide = base;
    wide.architecture.model.d_model = 320;
    wide.architecture.model.heads = wide.architecture.model.kv_heads = 5;
    wide.architecture.model.d_mlp = 544;
    wide.architecture.vocabulary = 251;
    wide.architecture.lora = {
        .rank = 4, .alpha = 8, .targets = {"query", "key", "value", "output", "up", "down", "gate"}};
    if (base.architecture.model.mlp == MlpActivation::gelu) wide.architecture.lora.targets.pop_back();
    all.emplace_back("wide, adapters", wide);
  }
  for (auto& [name, settings] : all) {
    if (settings.architecture.model.window > 0) settings.architecture.model.window = 70;
    settings.architecture.positions = settings.length = kText;
    settings.rows = kTogether * kText;
  }
  return all;
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}

/// Draws answers to a long and a short prompt, and compares with training on the first tokens of each.
void compare(SmallModel& model, const TransformerSettings& settings, double temperature, double top_p,
             std::int64_t vocabulary) {
  const parallel::Grid grid(weft::testing::world(), single_process());
  model::StepArena arena(weft::testing::execution(), grid);
  run::Timers timers;
  Generator generator({.architecture = settings.architecture,
                       .rows = kTogether + 1,
                       .prompts = 2,
                       .vocabulary = vocabulary,
                       .longest_prompt = kText - kNew,
                       .new_tokens = kNew,
                       .prefill_rows = settings.rows,
                       .temperature = temperature,
                       .top_p = top_p,
                       .as_trained = true},
                      model.transformer(), weft::testing::execution(), timers, arena);
  Prompt prompts[2];
  for (std::uint32_t i = 0; i < kText - kNew; ++i) prompts[0].ids.push_back(i * i % 29);
  prompts[1].ids = {5, 3};
  const std::vector<Answers> answers =
      draw_answers(generator, Tokenizer::bytes({}), {prompts[0], prompts[1]}, kSamples, 7, 3, 1);
  std::vector<PolicyRow> rows;
  std::vector<std::vector<float>> drawn;
  for (const Answers& of_prompt : answers)
    for (std::size_t i = 0; i < kSamples; ++i) {
      const std::size_t kept = of_prompt.drawn[i].size() - 7 * i;
      rows.push_back({of_prompt.prompt.ids, std::span(of_prompt.drawn[i]).first(kept), std::vector<float>(kept, 0.1f)});
      drawn.emplace_back(of_prompt.log_drawn[i].begin(),
                         of_prompt.log_drawn[i].begin() + static_cast<std::ptrdiff_t>(kept));
    }
  const device::Buffer<kernels::AdamStep> step(1);
  model::AccumulatingSink sink(model.parameters(), weft::testing::execution(), settings.rows);
  for (const std::int64_t micro_rows : {settings.rows, kText}) {
    PolicyBatch batch({.sequences = 2 * kSamples,
                       .length = kText,
                       .micro_rows = micro_rows,
                       .vocabulary = vocabulary,
                       .temperature = temperature,
                       .top_p = top_p},
                      weft::testing::execution(), arena);
    batch.fill(rows);
    sink.clear();
    model.transformer().prepare_weights();
    batch.add_gradients(model.transformer(), step.data(), sink, batch.passes());
    const std::vector<std::vector<float>> trained = batch.log_probabilities();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      CAPTURE(r);
      if (settings.type == kernels::Scalar::fp32)
        CHECK(bits_of(trained[r]) == bits_of(drawn[r]));
      else
        for (std::size_t t = 0; t < drawn[r].size(); ++t) CHECK(std::abs(trained[r][t] - drawn[r][t]) <= kRounding);
    }
  }
}

}  // namespace

TEST_CASE("drawn tokens have the log-probabilities of the training pass, in all bits") {
  for (const auto& [name, settings] : models()) {
    CAPTURE(name);
    SmallModel model(settings, kTogether, kText);
    compare(model, settings, 1, 1, 0);
    compare(model, settings, 0.8, 0.9, settings.architecture.vocabulary - 2);
    if (settings.architecture.lora.rank == 0) continue;
    for (std::size_t i = 0; i < model.parameters().size(); ++i) {  // adapters after a step
      if (model.parameters().specs()[i].name.find("lora_b") == std::string::npos) continue;
      std::vector<float> values = model.get(i);
      for (float& value : values) value *= -0.7f;
      model.set(i, values);
    }
    compare(model, settings, 1.3, 0.95, 0);
  }
}

TEST_CASE("in bf16 they differ by the rounding of logits") {
  for (auto [name, settings] : models()) {
    CAPTURE(name);
    settings.type = kernels::Scalar::bf16;
    SmallModel model(settings, kTogether, kText);
    compare(model, settings, 1, 1, 0);
  }
}

}  // namespace weft::polychromic
