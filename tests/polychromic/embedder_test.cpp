// SPDX-License-Identifier: Apache-2.0
//
// Embeddings of many texts in few forward passes: those of each text alone.
#include "polychromic/embedder.hpp"

#include <cmath>

#include "tests/language_model/small_model.hpp"
#include "tests/language_model/variants.hpp"

namespace weft::polychromic {

using namespace language_model;
namespace {

using testing::execution;
using testing::SmallModel;
using Text = std::vector<std::uint32_t>;

constexpr std::int64_t kContext = 32;

TransformerSettings with_context(TransformerSettings settings) {
  settings.architecture.positions = settings.length = kContext;
  return embedding_settings(settings, 3 * kContext);
}

std::vector<Text> some_texts(std::int64_t vocabulary) {
  std::vector<Text> texts;
  for (const std::size_t length : {1, 5, 32, 17, 0, 16, 9, 70, 30, 2, 3, 64}) {
    texts.emplace_back();
    for (std::size_t i = 0; i < length; ++i)
      texts.back().push_back(kernels::philox(7, kernels::Purpose::test, texts.size(), i).word[0] %
                             static_cast<std::uint32_t>(vocabulary));
  }
  return texts;
}

struct Memory {
  explicit Memory(const TransformerSettings& settings)
      : grid(testing::world(), single_process()),
        arena(execution(), grid),
        staging(settings.rows, false, execution(), arena) {}
  parallel::Grid grid;
  model::StepArena arena;
  Staging staging;
};

/// Sums of the last hidden states and of log-probabilities over the rows from `first` on of one sequence.
struct Alone {
  std::vector<double> hidden;
  double log_probability = 0;
};
Alone alone(SmallModel& model, const TransformerSettings& settings, Memory& memory, const Text& text,
            std::int64_t first) {
  dataset::TokenBatch batch = memory.staging.next(1, std::ssize(text));
  for (std::size_t i = 0; i < text.size(); ++i) {
    batch.ids[i] = text[i];
    batch.positions[i] = static_cast<std::int32_t>(i);
    batch.targets[i] = static_cast<std::int64_t>(i) + 1 >= std::max<std::int64_t>(1, first) && i + 1 < text.size()
                           ? static_cast<std::int32_t>(text[i + 1])
                           : kernels::kIgnored;
  }
  memory.staging.send(batch);
  const Tokens tokens = memory.staging.tokens(0, 1, std::ssize(text));
  model.transformer().prepare_weights();
  model.transformer().forward(tokens, nullptr);
  const std::int64_t width = settings.architecture.model.d_model;
  const kernels::AnyMatrix states = model.transformer().hidden_states(tokens);
  const std::vector<float> hidden = testing::to_host(states.data, states.rows * width);
  Alone out{std::vector<double>(static_cast<std::size_t>(width)), 0};
  for (std::int64_t row = first; row < states.rows; ++row)
    for (std::int64_t c = 0; c < width; ++c) out.hidden[c] += static_cast<double>(hidden[row * width + c]);
  model.transformer().losses(tokens, memory.staging.losses());
  for (const float loss : testing::to_host(memory.staging.losses().data, states.rows))
    out.log_probability -= static_cast<double>(loss);
  return out;
}

TEST_CASE("embeddings and log-probabilities are those of each text alone") {
  for (const auto& [name, base] : testing::variants()) {
    CAPTURE(name);
    const TransformerSettings settings = with_context(base);
    SmallModel model(settings, 1, kContext);
    Memory memory(settings);
    const std::vector<Text> texts = some_texts(settings.architecture.vocabulary);
    const std::int64_t width = settings.architecture.model.d_model, count = std::ssize(texts);
    for (const std::int64_t first : {0, 4}) {
      Embedder embedder(settings, model.transformer(), memory.staging, execution(), memory.arena, first / 4);
      std::vector<EmbeddedText> given;
      for (const Text& text : texts) given.push_back({text, std::min(first, std::ssize(text))});
      const device::Buffer<float> out(count * width);
      std::vector<double> log_probabilities(texts.size());
      embedder.embed(given, out.matrix(count, width), log_probabilities);
      const std::vector<float> embedded = testing::to_host(out.data(), count * width);
      for (std::size_t i = 0; i < texts.size(); ++i) {
        CAPTURE(i);
        const Text& text = texts[i];
        const std::int64_t size = std::ssize(text);
        std::vector<double> mean(static_cast<std::size_t>(width));
        double log_probability = 0;
        std::int64_t scored = 0;
        for (std::int64_t begin = 0; begin < size; begin += kContext) {
          const Text piece(text.begin() + begin, text.begin() + std::min(size, begin + kContext));
          const std::int64_t skipped = std::max<std::int64_t>(0, first - begin);
          if (skipped >= std::ssize(piece)) continue;
          const Alone one = alone(model, settings, memory, piece, skipped);
          for (std::size_t c = 0; c < mean.size(); ++c) mean[c] += one.hidden[c] / static_cast<double>(size - first);
          log_probability += one.log_probability;
          scored += std::ssize(piece) - std::max<std::int64_t>(1, skipped);
        }
        double error = 0, norm = 0;
        for (std::size_t c = 0; c < mean.size(); ++c) {
          error = std::hypot(error, mean[c] - static_cast<double>(embedded[i * mean.size() + c]));
          norm = std::hypot(norm, mean[c]);
        }
        CHECK(error <= 1e-5 * norm);  // as embedder.hpp states; 0 of an empty text
        const double expected = scored == 0 ? 0 : log_probability / static_cast<double>(scored);
        CHECK(std::abs(log_probabilities[i] - expected) <= 1e-5 * (1 + std::abs(expected)));
        if (scored > 0) CHECK(log_probabilities[i] < 0);
      }
    }
  }
}

TEST_CASE("texts do not affect one another, and a text of the prompt alone is empty") {
  const TransformerSettings settings = with_context(testing::gpt2());
  SmallModel model(settings, 1, kContext);
  Memory memory(settings);
  Embedder embedder(settings, model.transformer(), memory.staging, execution(), memory.arena);
  const Text a = {1, 2, 3, 4}, b = {5, 6, 7}, c = {9, 9};
  const std::int64_t width = settings.architecture.model.d_model;
  const auto embed = [&](const std::vector<EmbeddedText>& texts) {
    const device::Buffer<float> out(std::ssize(texts) * width);
    embedder.embed(texts, out.matrix(std::ssize(texts), width));
    return testing::to_host(out.data(), out.size());
  };
  const std::vector<float> first = embed({{a, 0}, {b, 0}, {b, 3}}), second = embed({{a, 0}, {c, 0}, {b, 3}});
  for (std::int64_t i = 0; i < width; ++i) {
    CHECK(first[i] == second[i]);
    CHECK(first[2 * width + i] == 0);
  }
  CHECK(std::vector<float>(first.begin() + width, first.begin() + 2 * width) !=
        std::vector<float>(second.begin() + width, second.begin() + 2 * width));
}

}  // namespace
}  // namespace weft::polychromic
