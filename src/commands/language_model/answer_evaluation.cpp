// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/answer_evaluation.hpp"

#include <cmath>
#include <optional>

#include "kernels/kokkos_runtime.hpp"
#include "language_model/encoder/sentence_encoder.hpp"
#include "language_model/generation/generator.hpp"

namespace weft::commands {

namespace {

/// Answers that are drawn together.
constexpr std::int64_t kAnswersTogether = 64;

/// Mean cosine distance of the embeddings of the answers; NaN without an encoder.
double semantic_diversity(std::optional<language_model::SentenceEncoder>& encoder,
                          const std::vector<std::string>& texts, const std::vector<char>& present,
                          const kernels::Execution& execution) {
  if (!encoder) return std::nan("");
  const std::int64_t rows = std::ssize(texts), width = encoder->width();
  const device::Buffer<float> embeddings(rows * width);
  encoder->embed(texts, embeddings.matrix(rows, width));
  std::vector<float> host(static_cast<std::size_t>(rows * width));
  device::copy(execution, host.data(), embeddings.data(), 4 * rows * width, device::Direction::to_host);
  kernels::fence(execution);
  return polychromic::set_advantages({.set_size = 2}, std::vector<double>(texts.size()),
                                     polychromic::cosine_distances({host.data(), rows, width, width}), present)
      .diversity;
}

}  // namespace

polychromic::AnswerMeasures measure_answers(const LoadedLanguageModel& loaded, polychromic::Configuration configuration,
                                            const parallel::World& world) {
  // Other files of this folder have names of the same.
  using polychromic::AnsweredPrompt, polychromic::AnswerIds, polychromic::AnswerMeasures, polychromic::Answers,
      polychromic::Judgement, polychromic::Prompt, polychromic::Reward, polychromic::RewardKind, polychromic::Settings;
  const Settings& settings = configuration.polychromic;
  const auto refuse = [](const char* why) { throw collective_error(ExitCode::usage, "--answers: {}", why); };
  if (!loaded.tokenizer) refuse("the model has no tokeniser; name another model");
  if (settings.uses_likelihood())
    refuse(
        "polychromic.reward = \"likelihood\" or \"reference_likelihood\" needs the initial model; name a model that "
        "was trained with another");
  if (const std::string why =
          language_model::generation_obstacle(loaded.architecture().model, loaded.architecture().positions);
      !why.empty())
    refuse(why.c_str());
  polychromic::require_reward(settings, world);
  const std::vector<Prompt> prompts = polychromic::read_prompts(settings, *loaded.tokenizer, world);
  std::int64_t longest = 0;
  for (const Prompt& prompt : prompts) longest = std::max(longest, std::ssize(prompt.ids));
  if (longest + settings.max_new_tokens > configuration.data.sequence)
    refuse("the longest prompt with polychromic.max_new_tokens does not fit data.sequence; take shorter prompts");

  const std::int64_t together = std::max<std::int64_t>(1, kAnswersTogether / settings.samples);
  const ModelRanks& ranks = loaded.part.ranks;
  language_model::GenerationSettings generation = polychromic::answer_settings(
      configuration, loaded.part.model.architecture(), together, longest, kAnswersTogether);
  generation.vocabulary = loaded.tokenizer->vocabulary_size();
  ForwardOnly forward(loaded, std::max(generation.most_rows(), kAnswersTogether));
  language_model::Generator generator(generation, forward.transformer, loaded.execution(), forward.timers,
                                      forward.arena);
  const std::unique_ptr<Reward> reward = polychromic::make_reward(settings);
  std::optional<language_model::SentenceEncoder> encoder;
  if (!settings.embedder.empty()) encoder.emplace(settings.embedder, loaded.execution());
  AnswerMeasures measures;
  const parallel::Range own = parallel::part(std::ssize(prompts), ranks.peers.size(), ranks.peers.rank());
  for (std::int64_t begin = own.begin; begin < own.end; begin += together) {
    const auto first = prompts.begin() + begin;
    const std::vector<Answers> answers = polychromic::draw_answers(
        generator, *loaded.tokenizer, {first, first + std::min(together, own.end - begin)}, settings.samples,
        static_cast<std::uint64_t>(configuration.run.seed), 0, begin, settings.stop);
    const std::vector<AnsweredPrompt> answered = polychromic::answered_prompts(answers, *loaded.tokenizer);
    const std::vector<std::vector<double>> scores = reward->scores(answered);
    for (std::size_t p = 0; p < answers.size(); ++p) {
      std::vector<char> present;
      for (const AnswerIds& ids : answers[p].ids) present.push_back(ids.empty() ? 0 : 1);
      Judgement judgement;
      judgement.rewards = scores[p];
      judgement.text = polychromic::text_diversity(answers[p].ids);
      judgement.advantages.objective = std::nan("");
      judgement.semantic = semantic_diversity(encoder, answered[p].answers, present, loaded.execution());
      measures.add(answers[p], judgement);
    }
  }
  measures.sum_over(ranks.peers);
  return measures;
}

}  // namespace weft::commands
