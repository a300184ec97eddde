// SPDX-License-Identifier: Apache-2.0
//
// Generation with a cache of keys and values: the same probabilities as a forward pass over the whole text, for every
// architecture; and what a sample does not depend on.
#include <cmath>

#include "kernels/language/linear/linear.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/run/memory_plan.hpp"
#include "tests/language_model/small_model.hpp"
#include "tests/language_model/variants.hpp"

namespace weft::language_model {
namespace {

using weft::testing::SmallModel;
using Text = std::vector<std::uint32_t>;

constexpr std::int64_t kContext = 24;

/// A small model of the variant whose context is longer than a block of prompts.
TransformerSettings with_context(TransformerSettings settings, std::int64_t context = kContext) {
  settings.architecture.positions = settings.length = context;
  settings.rows = 2 * context;
  return settings;
}

struct Written {
  Text text;
  std::vector<float> log_probability, log_drawn;
};

struct Options {
  std::int64_t rows = 4, new_tokens = 9, prefill_rows = 0, top_k = 0;
  double temperature = 1, top_p = 1;
  std::uint64_t seed = 1;
  std::int64_t vocabulary = 0;
};

GenerationSettings generation_settings(const TransformerSettings& model, const std::vector<Text>& prompts,
                                       const Options& options) {
  GenerationSettings settings{.architecture = model.architecture,
                              .type = model.type,
                              .rows = options.rows,
                              .prompts = std::ssize(prompts),
                              .vocabulary = options.vocabulary,
                              .new_tokens = options.new_tokens,
                              .prefill_rows = options.prefill_rows,
                              .temperature = options.temperature,
                              .top_k = options.top_k,
                              .top_p = options.top_p};
  for (const Text& prompt : prompts) settings.longest_prompt = std::max(settings.longest_prompt, std::ssize(prompt));
  return settings;
}

/// Samples of each prompt, prompt by prompt. `first`: number of the first prompt. stops(request, tokens): ends it.
template <class Stops>
std::vector<Written> write(SmallModel& model, const TransformerSettings& settings, const std::vector<Text>& prompts,
                           std::uint32_t samples, const Options& options, const Stops& stops, std::uint32_t first = 0) {
  const parallel::Grid grid(testing::world(), single_process());
  model::StepArena arena(testing::execution(), grid);
  run::Timers timers;
  Generator generator(generation_settings(settings, prompts, options), model.transformer(), testing::execution(),
                      timers, arena);
  std::vector<GenerationRequest> requests;
  for (std::uint32_t prompt = 0; prompt < prompts.size(); ++prompt)
    for (std::uint32_t sample = 0; sample < samples; ++sample)
      requests.push_back({prompts[prompt], first + prompt, sample});
  std::vector<Written> written(requests.size());
  generator.run(requests, options.seed, 0, [&](std::size_t i, const kernels::Drawn& drawn) {
    written[i].text.push_back(drawn.token);
    written[i].log_probability.push_back(drawn.log_probability);
    written[i].log_drawn.push_back(drawn.log_drawn);
    return !stops(i, written[i].text);
  });
  return written;
}

std::vector<Written> write(SmallModel& model, const TransformerSettings& settings, const std::vector<Text>& prompts,
                           std::uint32_t samples, const Options& options = {}, std::uint32_t first = 0) {
  return write(
      model, settings, prompts, samples, options, [](std::size_t, const Text&) { return false; }, first);
}

/// log softmax of the last row of a forward pass over the whole text.
std::vector<double> log_probabilities(SmallModel& model, const TransformerSettings& settings, const Text& text) {
  const parallel::Grid grid(testing::world(), single_process());
  model::StepArena arena(testing::execution(), grid);
  Staging staging(settings.rows, false, testing::execution(), arena);
  dataset::TokenBatch batch = staging.next(1, std::ssize(text));
  for (std::size_t i = 0; i < text.size(); ++i) {
    batch.ids[i] = text[i];
    batch.targets[i] = kernels::kIgnored;
    batch.positions[i] = static_cast<std::int32_t>(i);
  }
  staging.send(batch);
  model.transformer().prepare_weights();
  model.transformer().forward(staging.tokens(0, 1, std::ssize(text)), nullptr);
  const std::vector<float> logits = model.transformer().logits(std::ssize(text) - 1);
  double total = 0;
  for (const float z : logits) total += std::exp(static_cast<double>(z));
  std::vector<double> out;
  for (const float z : logits) out.push_back(static_cast<double>(z) - std::log(total));
  return out;
}

std::vector<Text> texts_of(const std::vector<Written>& written) {
  std::vector<Text> texts;
  for (const Written& one : written) texts.push_back(one.text);
  return texts;
}

const std::vector<Text> kPrompts = {{3, 1, 4, 1, 5}, {9}, {2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2}, {1, 2, 3, 4, 5}};

}  // namespace

TEST_CASE("with the cache the probabilities are those of a forward pass over the whole text") {
  for (auto [name, settings] : testing::variants()) {
    CAPTURE(name);
    settings = with_context(settings);
    SmallModel model(settings, 2, kContext);
    const std::vector<Written> written = write(model, settings, kPrompts, 2, {.new_tokens = 12});
    for (std::size_t i = 0; i < written.size(); ++i) {
      Text text = kPrompts[i / 2];
      REQUIRE(written[i].text.size() == 12);
      for (std::size_t k = 0; k < written[i].text.size(); ++k) {
        const double expected = log_probabilities(model, settings, text)[written[i].text[k]];
        // fp32 sums in other orders: relative to logits of up to 10 in size, 1e-5 of them.
        CHECK(std::abs(static_cast<double>(written[i].log_probability[k]) - expected) <= 1e-4);
        text.push_back(written[i].text[k]);
      }
    }
  }
}

TEST_CASE("ids that the tokeniser does not have are not drawn, and probabilities are those among the others") {
  const TransformerSettings settings = with_context(testing::gpt2());
  SmallModel model(settings, 2, kContext);
  const std::int64_t all = settings.architecture.vocabulary, vocabulary = all / 2;
  for (const Options& options :
       {Options{.new_tokens = 12}, Options{.new_tokens = 12, .top_k = 4}, Options{.new_tokens = 12, .top_p = 0.8},
        Options{.new_tokens = 12, .temperature = 0}}) {
    Options some = options;
    some.vocabulary = vocabulary;
    const auto beyond = [&](const Options& given) {
      std::int64_t count = 0;
      for (const Written& one : write(model, settings, kPrompts, 2, given))
        count += std::count_if(one.text.begin(), one.text.end(), [&](std::uint32_t id) { return id >= vocabulary; });
      return count;
    };
    CHECK(beyond(options) > 0);
    CHECK(beyond(some) == 0);
    const Written one = write(model, settings, kPrompts, 2, some)[0];
    Text text = kPrompts[0];
    for (std::size_t k = 0; k < one.text.size(); ++k) {
      const std::vector<double> expected = log_probabilities(model, settings, text);
      double drawable = 0;
      for (std::int64_t id = 0; id < vocabulary; ++id) drawable += std::exp(expected[static_cast<std::size_t>(id)]);
      CHECK(std::abs(static_cast<double>(one.log_probability[k]) - (expected[one.text[k]] - std::log(drawable))) <=
            1e-4);
      text.push_back(one.text[k]);
    }
  }
}

TEST_CASE("prompts that are padded to lengths between powers of two give the same probabilities") {
  constexpr std::int64_t kLongContext = 360;
  const TransformerSettings settings = with_context(testing::gpt2(), kLongContext);
  SmallModel model(settings, 2, kLongContext);
  std::vector<Text> prompts;
  for (const std::size_t length : {258, 290, 330}) {
    Text& prompt = prompts.emplace_back(length);
    for (std::size_t i = 0; i < length; ++i) prompt[i] = static_cast<std::uint32_t>((7 * i + length) % 11);
  }
  const std::vector<Written> written = write(model, settings, prompts, 1, {.new_tokens = 2});
  for (std::size_t i = 0; i < written.size(); ++i) {
    Text text = prompts[i];
    for (std::size_t k = 0; k < 2; ++k) {
      const double expected = log_probabilities(model, settings, text)[written[i].text[k]];
      CHECK(std::abs(static_cast<double>(written[i].log_probability[k]) - expected) <= 1e-4);
      text.push_back(written[i].text[k]);
    }
  }
}

TEST_CASE("types of 16 bits give the same probabilities within their rounding") {
  for (const kernels::Scalar type : {kernels::Scalar::bf16, kernels::Scalar::fp16}) {
    TransformerSettings settings = with_context(testing::llama());
    settings.type = type;
    SmallModel model(settings, 2, kContext);
    const std::vector<Written> written = write(model, settings, kPrompts, 1);
    double difference = 0;
    for (std::size_t i = 0; i < written.size(); ++i) {
      Text text = kPrompts[i];
      for (std::size_t k = 0; k < written[i].text.size(); ++k) {
        const double expected = log_probabilities(model, settings, text)[written[i].text[k]];
        difference = std::max(difference, std::abs(static_cast<double>(written[i].log_probability[k]) - expected));
        text.push_back(written[i].text[k]);
      }
    }
    // Roundings of 2^-8 (2^-11) of residual streams and logits of some units: 0.1 (0.02).
    CHECK(difference <= (type == kernels::Scalar::bf16 ? 0.25 : 0.05));
  }
}

TEST_CASE("a sample depends neither on other prompts and samples nor on the division into batches") {
  const TransformerSettings settings = with_context(testing::gpt2());
  SmallModel model(settings, 2, kContext);
  const std::vector<Text> together = texts_of(write(model, settings, kPrompts, 3));
  REQUIRE(together.size() == 12);
  CHECK(together[0] != together[1]);
  CHECK(together[0] != together[9]);
  for (std::uint32_t prompt = 0; prompt < kPrompts.size(); ++prompt) {
    const std::vector<Text> alone = texts_of(write(model, settings, {kPrompts[prompt]}, 1, {}, prompt));
    CHECK(alone[0] == together[3 * prompt]);
    const std::vector<Text> more = texts_of(write(model, settings, {kPrompts[prompt]}, 7, {}, prompt));
    for (std::size_t sample = 0; sample < 3; ++sample) CHECK(more[sample] == together[3 * prompt + sample]);
  }
  // Other sizes of the products round differently; the draws of this seed do not notice.
  for (const std::int64_t rows : {1, 2, 16})
    CHECK(texts_of(write(model, settings, kPrompts, 3, {.rows = rows})) == together);
  CHECK(texts_of(write(model, settings, kPrompts, 3, {.prefill_rows = 32})) == together);
  CHECK(texts_of(write(model, settings, kPrompts, 3, {.seed = 2})) != together);
}

TEST_CASE("memory for forward passes over prompts is that of the longest pass") {
  GenerationSettings settings{.architecture = with_context(testing::gpt2()).architecture, .rows = 3, .new_tokens = 2};
  const auto most_rows = [&](std::int64_t prompt, std::int64_t prefill_rows) {
    settings.longest_prompt = prompt;
    settings.prefill_rows = prefill_rows;
    return settings.most_rows();
  };
  CHECK(most_rows(1, 4096) == 3);   // no prefix: the rows of a step
  CHECK(most_rows(9, 4096) == 24);  // 8 positions of each row
  CHECK(most_rows(9, 20) == 20);
  CHECK(most_rows(9, 0) == 8);  // one at a time
}

TEST_CASE("rows of texts that end early are given to the next ones, which do not change") {
  const TransformerSettings settings = with_context(testing::llama());
  SmallModel model(settings, 2, kContext);
  const std::vector<Text> whole = texts_of(write(model, settings, kPrompts, 4));
  const auto stops = [](std::size_t request, const Text& text) { return text.size() == 1 + request % 5; };
  const std::vector<Text> cut = texts_of(write(model, settings, kPrompts, 4, {.rows = 3}, stops));
  for (std::size_t i = 0; i < cut.size(); ++i)
    CHECK(cut[i] == Text(whole[i].begin(), whole[i].begin() + 1 + static_cast<std::ptrdiff_t>(i % 5)));
}

TEST_CASE("temperature 0 writes the most probable tokens") {
  const TransformerSettings settings = with_context(testing::llama());
  SmallModel model(settings, 2, kContext);
  for (const Options& greedy : {Options{.temperature = 0}, Options{.top_k = 1}, Options{.top_p = 1e-9}}) {
    const std::vector<Written> written = write(model, settings, kPrompts, 1, greedy);
    for (std::size_t i = 0; i < written.size(); ++i) {
      Text text = kPrompts[i];
      for (const std::uint32_t token : written[i].text) {
        const std::vector<double> p = log_probabilities(model, settings, text);
        CHECK(p[token] >= *std::max_element(p.begin(), p.end()) - 1e-4);
        text.push_back(token);
      }
      CHECK(written[i].log_drawn == std::vector<float>(written[i].text.size(), 0.0f));
    }
  }
}

TEST_CASE("products that apply the norms write the texts of separate norms, within rounding") {
  std::vector<std::pair<std::string, TransformerSettings>> models = testing::variants();
  // Wide enough for the tiles of several blocks, of one kind for up to 32 rows and of another one for more.
  models.emplace_back("wide", testing::gpt2());
  models.back().second.architecture.model.d_model = 256;
  models.back().second.architecture.model.d_mlp = 1024;
  for (auto& [name, settings] : models)
    for (const std::int64_t rows : {1, 4, 40}) {
      CAPTURE(name);
      CAPTURE(rows);
      settings = with_context(settings);
      settings.type = kernels::Scalar::bf16;
      const ModelSettings& architecture = settings.architecture.model;
      SmallModel model(settings, 2, kContext);
      const Options greedy{.rows = rows, .temperature = 0};
      const std::uint32_t samples = rows > 4 ? 10 : 1;
      const std::vector<Written> joined = write(model, settings, kPrompts, samples, greedy);
      // A tap gets inputs and outputs of the sublayers, which are then formed.
      std::int64_t tapped = 0;
      model.transformer().tap([&](std::int64_t, const kernels::AnyMatrix&, const kernels::AnyMatrix&) { ++tapped; });
      const std::vector<Written> separate = write(model, settings, kPrompts, samples, greedy);
      CHECK(tapped > 0);
      const bool joins = architecture.normalises_inputs() && !architecture.normalises_outputs() &&
                         kernels::joins_norms(testing::execution(), settings.type, rows, architecture.d_model);
      std::int64_t compared = 0, all = 0;
      for (std::size_t i = 0; i < joined.size(); ++i) {
        if (!joins) CHECK(joined[i].log_probability == separate[i].log_probability);
        all += std::ssize(joined[i].text);
        for (std::size_t k = 0; k < joined[i].text.size(); ++k) {
          // Texts part where two tokens are equally probable but for rounding. Roundings as in the test of types.
          const double difference = std::abs(static_cast<double>(joined[i].log_probability[k]) -
                                             static_cast<double>(separate[i].log_probability[k]));
          CHECK(difference <= 0.25);
          if (joined[i].text[k] != separate[i].text[k]) break;
          ++compared;
        }
      }
      CHECK(2 * compared > all);
    }
}

TEST_CASE("a text that reaches the context goes on with the last half of it") {
  for (const TransformerSettings& base : {testing::gpt2(), testing::llama()}) {
    const TransformerSettings settings = with_context(base);
    SmallModel model(settings, 2, kContext);
    const std::vector<Written> written = write(model, settings, kPrompts, 2, {.rows = 3, .new_tokens = 70});
    for (std::size_t i = 0; i < written.size(); ++i) {
      REQUIRE(written[i].text.size() == 70);
      Text context = kPrompts[i / 2];
      for (std::size_t k = 0; k < 70; ++k) {
        if (std::ssize(context) > kContext) context.erase(context.begin(), context.end() - kContext / 2);
        const double expected = log_probabilities(model, settings, context)[written[i].text[k]];
        CHECK(std::abs(static_cast<double>(written[i].log_probability[k]) - expected) <= 1e-4);
        context.push_back(written[i].text[k]);
      }
    }
    // The prompt may be as long as the context.
    const Text longest(static_cast<std::size_t>(kContext), 7);
    const std::vector<Written> one = write(model, settings, {longest}, 1, {.new_tokens = 1});
    CHECK(std::abs(static_cast<double>(one[0].log_probability[0]) -
                   log_probabilities(model, settings, longest)[one[0].text[0]]) <= 1e-4);
  }
}

TEST_CASE("generation of a model with parameters that are not finite ends with an error") {
  const TransformerSettings settings = with_context(testing::gpt2());
  SmallModel model(settings, 2, kContext);
  const std::size_t table = model.parameters().index("embedding/tokens");
  std::vector<float> values = model.get(table);
  values[0] = std::nanf("");
  model.set(table, values);
  try {
    write(model, settings, {{0}}, 1);
    FAIL("no error");
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::numeric);
  }
}

TEST_CASE("sparse attention has no cache") {
  ModelSettings model;
  CHECK(generation_obstacle(model, 1).empty());
  model.sparse_blocks = 2;
  CHECK(generation_obstacle(model, 1).find("sparse_blocks") != std::string::npos);
}

}  // namespace weft::language_model
