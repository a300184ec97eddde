// SPDX-License-Identifier: Apache-2.0
//
// Table [polychromic]: fine-tuning for quality and diversity of sets of answers; and all tables of such a run.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "input/schema.hpp"
#include "kernels/language/diversity/set_rule.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::polychromic {

/// Distance of two answers: of embeddings, or of their tokens (text_diversity.hpp).
enum class DiversityMeasure { semantic, distinct, self_bleu };
/// Score of an answer (reward.hpp).
enum class RewardKind { constant, likelihood, reference_likelihood, exact, regex, length, file, command };
/// What the gradient of a batch of answers raises: the objective of sets (kernels/language/diversity/set_rule.hpp), or
/// what advantage.hpp says.
enum class Objective { product, additive, supervised, grpo, rloo, best_of_n };
/// Mean reward that the weight of the diversity holds (reward_constraint.hpp): none, that of the initial model,
/// reward_target.
enum class HoldReward { none, initial, target };

struct Settings {
  std::int64_t every = 5;             ///< steps from one batch of answers to the next
  std::int64_t prompts = 4;           ///< of a batch of answers, all ranks together
  std::int64_t samples = 8;           ///< N: answers per prompt
  std::int64_t set_size = 4;          ///< n: answers of a set, less than N
  double weight = 0.3;                ///< lambda: factor of the objective, added to the supervised loss
  double temperature = 0.9;           ///< of the distribution that is sampled and trained
  double top_p = 1;                   ///< of that distribution the most probable tokens with this sum
  std::int64_t max_new_tokens = 100;  ///< of an answer
  std::vector<std::string> stop;      ///< texts before which an answer ends
  std::string prompts_file;           ///< "": prompts are cut from the training text
  std::int64_t prompt_tokens = 16;    ///< of a prompt that is cut
  std::int64_t evaluation_prompts = 16;
  std::int64_t draw_together = 0;   ///< answers that a rank writes at the same time; 0: all
  std::int64_t embed_together = 0;  ///< texts of a forward pass that forms embeddings; 0: as many as fit
  Objective objective = Objective::product;
  bool standardise = true;        ///< of grpo: divides advantages by the standard deviation of the rewards
  double diversity_weight = 0.5;  ///< alpha of the additive objective
  HoldReward hold_reward = HoldReward::none;
  double reward_target = 0;        ///< with HoldReward::target
  double hold_gain = 6;            ///< change of log alpha per unit of reward
  std::int64_t hold_horizon = 40;  ///< batches of answers after which the integral has the weight of the error
  DiversityMeasure diversity = DiversityMeasure::semantic;
  std::string embedder;        ///< directory of an encoder; "": the frozen model forms embeddings
  double semantic_weight = 0;  ///< factor of the semantic distance, added to another distance
  RewardKind reward = RewardKind::constant;
  std::vector<std::string> more_rewards;  ///< names of further rewards, which are added
  std::vector<double> more_weights;       ///< their factors
  std::string reward_pattern, reward_file, reward_command;
  std::int64_t reward_length = 0;  ///< tokens of an answer
  double reward_time_limit = 60;   ///< seconds per batch of answers
  std::int64_t epochs = 1;         ///< steps that use a batch of answers
  double clip = 0.2;               ///< of the ratio of probabilities, with epochs > 1
  double kl = 0;                   ///< factor of the divergence from the frozen model

  kernels::SetRule set_rule() const {
    if (!of_sets()) return {.set_size = 2};  // for measures
    return {
        .objective = objective == Objective::product ? kernels::SetObjective::product : kernels::SetObjective::additive,
        .set_size = set_size,
        .diversity_weight = diversity_weight};
  }
  bool of_sets() const { return objective == Objective::product || objective == Objective::additive; }
  /// True if answers have a gradient.
  bool trains() const { return (weight > 0 && objective != Objective::supervised) || kl > 0; }
  /// The rewards that are added, with their factors.
  std::vector<std::pair<RewardKind, double>> rewards() const;
  bool uses(RewardKind) const;
  /// True if a reward compares answers with the reference of their prompt.
  bool needs_references() const { return uses(RewardKind::exact) || uses(RewardKind::reference_likelihood); }
  /// True if a reward is a probability under the initial model.
  bool uses_likelihood() const { return uses(RewardKind::likelihood) || uses(RewardKind::reference_likelihood); }
  /// True if answers pass the initial model: for embeddings, likelihoods or the divergence from it.
  bool uses_frozen_model() const { return embedder.empty() || uses_likelihood() || kl > 0; }
  bool holds_reward() const { return hold_reward != HoldReward::none && weight > 0; }
};

/// The tables of a language model, and those of its polychromic training.
struct Configuration : language_model::Configuration {
  Settings polychromic;
};

/// Every key of these tables with the conditions between keys, as language_model::schema. Inputs of all language models
/// are read by it: they may have the tables of a training that follows.
input::Schema schema(Configuration&);

}  // namespace weft::polychromic
