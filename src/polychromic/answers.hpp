// SPDX-License-Identifier: Apache-2.0
//
// Answers to prompts, and what they are worth.
//
// A Judge has the frozen model: the weights with which the training began. It gives each answer its embedding, unless
// there is an encoder for that (polychromic.embedder), and, as a reward, its likelihood. Of a model with adapters
// ([lora]) these are the weights of the run itself, with the adapters left out: no second copy is needed.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/language/diversity/set_advantages.hpp"
#include "language_model/encoder/sentence_encoder.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/run/initial_model.hpp"
#include "language_model/step/language_trainer.hpp"
#include "polychromic/advantage.hpp"
#include "polychromic/embedder.hpp"
#include "polychromic/prompts.hpp"
#include "polychromic/reward.hpp"
#include "polychromic/text_diversity.hpp"

namespace weft::polychromic {

/// The answers to one prompt.
struct Answers {
  Prompt prompt;
  std::vector<AnswerIds> drawn;               ///< as drawn, with the symbol or stop text that ends it if there is one
  std::vector<AnswerIds> ids;                 ///< without it: what counts as the answer
  std::vector<char> ended;                    ///< 1: by a symbol or a stop text; 0: cut by its length
  std::vector<std::vector<float>> log_drawn;  ///< of each token of `drawn`, under the distribution it was drawn from
};

/// Rewards, measures and advantages of the answers to one prompt.
struct Judgement {
  std::vector<double> rewards;  ///< [answers]
  PromptAdvantages advantages;  ///< of the objective's measure of diversity
  double semantic = 0;          ///< mean distance of pairs of embeddings
  TextDiversity text;
};

/// Settings of the generator of `prompts` prompts at a time. most_rows: of logits at a time.
language_model::GenerationSettings answer_settings(const Configuration&, const language_model::Architecture&,
                                                   std::int64_t prompts, std::int64_t longest_prompt,
                                                   std::int64_t most_rows);

/// Draws N answers to each prompt. step: key of the random numbers, with the number of the prompt, `first` + its index.
/// stops: texts before which an answer ends; tokens with a part of one are among those that were drawn, not of the
/// answer.
std::vector<Answers> draw_answers(language_model::Generator&, const language_model::Tokenizer&, std::vector<Prompt>,
                                  std::int64_t samples, std::uint64_t seed, std::uint64_t step, std::int64_t first,
                                  std::span<const std::string> stops = {});

/// The answers as texts, for rewards.
std::vector<AnsweredPrompt> answered_prompts(std::span<const Answers>, const language_model::Tokenizer&);

/// The sum of the rewards of the settings. of_answers, of_references: log-probabilities (likelihood_reward) for
/// "likelihood" and "reference_likelihood" alone.
std::unique_ptr<Reward> make_reward(const Settings&, const std::vector<double>* of_answers = nullptr,
                                    const std::vector<double>* of_references = nullptr);

/// Requires that the pattern of the reward can be compiled, or its file can be read. Collective; throws what the
/// functions of reward.hpp throw, on all ranks.
void require_reward(const Settings&, const parallel::World&);

class Judge {
 public:
  struct Buffers {
    Buffers(const Configuration&, const language_model::Architecture&, std::int64_t answers, model::StepArena&);
    kernels::Matrix<float> embeddings;  ///< [answers, C], or as wide as those of the encoder
    kernels::Array<double> rewards, workspace;
    kernels::SetAdvantages advantages;
    kernels::Array<double> host_rewards;
    kernels::Matrix<float> host_embeddings;  ///< with polychromic.semantic_weight
    kernels::SetAdvantages host_advantages;
  };

  /// Judges at most `answers` answers at a time. References must outlive the object. Collective.
  /// A divided model is frozen in the parts in which `trainer` has it; one rank of its ranks asks for the rewards.
  Judge(const Configuration&, language_model::Trainer& trainer, const language_model::Tokenizer&, std::int64_t answers,
        const language_model::InitialModel&, const parallel::World&, const parallel::Grid&, const kernels::Execution&,
        run::Timers&, model::StepArena&);

  /// by_stage: each stage is a phase of the timers.
  enum class Timing { none, by_stage };
  /// Judges the answers, polychromic.samples for each prompt; one judgement per prompt.
  std::vector<Judgement> judge(std::span<const Answers>, const kernels::SetRule&, Timing);

  /// True if there is no frozen model but that of the run without its adapters, whose weights are in checkpoints.
  bool shares_weights() const { return own_ == nullptr; }
  /// Transformer of the frozen model. If weights are shared, prepare_weights must be called after they are loaded.
  language_model::Transformer& transformer() { return transformer_; }
  /// Digest (sha256) of the frozen weights that are not in checkpoints: those of the model unless they are shared, and
  /// those of the encoder; "" if there are none.
  std::string digest() const;

  /// Settings of a transformer for forward passes of the frozen model.
  static language_model::TransformerSettings forward_settings(const Configuration&, const language_model::Architecture&,
                                                              const parallel::GridShape&, std::int64_t rank);

 private:
  void embed(std::span<const Answers>);
  std::string whole(std::string held, const checkpoint::Tensor&) const;
  std::vector<std::vector<double>> scores(std::span<const Answers>);
  std::vector<double> token_distances(const Answers&, std::int64_t prompt) const;

  const Settings settings_;
  const language_model::Tokenizer& tokenizer_;
  const kernels::Execution execution_;
  run::Timers& timers_;
  const parallel::Communicator& copy_;                      // the ranks that have one copy of the model
  const std::unique_ptr<const language_model::Model> own_;  // frozen, without moments; none: shared or not used
  Buffers buffers_;
  language_model::Transformer transformer_;
  language_model::Staging staging_;
  Embedder embedder_;
  std::optional<language_model::SentenceEncoder> encoder_;
  // Mean log-probabilities of the answers in `buffers_`, and of their references, under the frozen model.
  std::vector<double> log_probabilities_, reference_log_probabilities_;
  std::unique_ptr<Reward> reward_;
};

}  // namespace weft::polychromic
