// SPDX-License-Identifier: Apache-2.0
#include "polychromic/polychromic_settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>

#include "language_model/tokenizer/json_lines.hpp"

namespace weft::polychromic {

using namespace language_model;
namespace {

constexpr double kMostStepPrompts = 1 << 16, kMostSamples = 1 << 12, kMostTokens = 1 << 20;

constexpr std::pair<const char*, RewardKind> kRewards[] = {{"constant", RewardKind::constant},
                                                           {"likelihood", RewardKind::likelihood},
                                                           {"reference_likelihood", RewardKind::reference_likelihood},
                                                           {"exact", RewardKind::exact},
                                                           {"regex", RewardKind::regex},
                                                           {"length", RewardKind::length},
                                                           {"file", RewardKind::file},
                                                           {"command", RewardKind::command}};

const std::pair<const char*, RewardKind>* reward_of(const std::string& name) {
  return std::find_if(std::begin(kRewards), std::end(kRewards), [&](const auto& one) { return one.first == name; });
}

/// The rule of a key that a reward needs: an error if one is there without the other.
void add_reward_rule(input::Schema& schema, const Settings& polychromic, RewardKind kind, const char* name,
                     const char* key, std::function<bool()> is_given) {
  schema.rule({fmt::format("polychromic.{}", key), "polychromic.reward", "polychromic.more_rewards"},
              [=, &polychromic]() -> std::string {
                const bool used = polychromic.uses(kind);
                if (used == is_given()) return {};
                return used ? fmt::format("polychromic.reward = \"{}\" needs polychromic.{}; give it", name, key)
                            : fmt::format("polychromic.{} is for polychromic.reward = \"{}\" only; leave it out", key,
                                          name);
              });
}

void add_sampling_keys(input::Schema& schema, Settings& polychromic) {
  schema.add("polychromic.every", polychromic.every, "steps between batches of answers; other steps are supervised")
      .in("steps")
      .at_least(1)
      .at_most(input::kMostSteps);
  schema.add("polychromic.prompts", polychromic.prompts, "prompts of a batch of answers, all ranks together")
      .at_least(1)
      .at_most(kMostStepPrompts);
  schema.add("polychromic.samples", polychromic.samples, "answers per prompt, more than set_size")
      .at_least(3)
      .at_most(kMostSamples);
  schema
      .add("polychromic.set_size", polychromic.set_size,
           "answers per set, whose quality and diversity are rated together")
      .at_least(2)
      .at_most(kMostSamples);
  schema
      .add("polychromic.temperature", polychromic.temperature,
           "temperature of the distribution from which answers are drawn and whose gradient is formed")
      .at_least(0.01)
      .at_most(100);
  schema
      .add("polychromic.top_p", polychromic.top_p,
           "answers are drawn from the most probable tokens whose probabilities reach this sum, and the gradient is "
           "that of this distribution; 1 = all")
      .more_than(0)
      .at_most(1);
  schema.add("polychromic.max_new_tokens", polychromic.max_new_tokens, "length of an answer")
      .in("tokens")
      .at_least(1)
      .at_most(kMostTokens);
  schema.add("polychromic.stop", polychromic.stop, "texts before which an answer ends");
  schema
      .add("polychromic.prompts_file", polychromic.prompts_file,
           "prompts, one per line, used in turn; FILE.jsonl (or .ndjson, .json): {\"prompt\": TEXT, \"reference\": "
           "TEXT} per line; \"\" = pieces of the training text at random places")
      .path_name();
  schema.add("polychromic.prompt_tokens", polychromic.prompt_tokens, "length of a prompt that is cut from a text")
      .in("tokens")
      .at_least(1)
      .at_most(kMostTokens);
  schema
      .add(
          "polychromic.evaluation_prompts", polychromic.evaluation_prompts,
          "prompts whose answers are measured before, during (log.evaluate_every) and after the training: the first of "
          "prompts_file, or cut from the validation text; 0 = none")
      .at_least(0)
      .at_most(kMostStepPrompts)
      .free();
  schema
      .add("polychromic.draw_together", polychromic.draw_together,
           "answers that a rank generates at a time; fewer need less memory for keys and values; 0 = all")
      .at_least(0)
      .at_most(1 << 20)
      .free();
  schema
      .add("polychromic.embed_together", polychromic.embed_together,
           "answers whose embeddings and likelihoods are computed at a time; 0 = as many as fit into a micro-batch")
      .at_least(0)
      .at_most(1 << 20)
      .free();
}

void add_reward_keys(input::Schema& schema, Settings& polychromic) {
  schema.add("polychromic.reward", polychromic.reward, {std::begin(kRewards), std::end(kRewards)},
             "score of an answer: 1; the geometric mean of its probabilities under the initial model; that of the "
             "probabilities of the reference of the prompt, after prompt and answer; 1 if it is the reference; 1 if "
             "reward_pattern matches; 1 - |tokens - reward_length| / reward_length, at "
             "least 0; from reward_file; from "
             "reward_command");
  schema.add("polychromic.more_rewards", polychromic.more_rewards, "names of further rewards, which are added");
  schema.add("polychromic.more_weights", polychromic.more_weights, "factors of more_rewards, one each");
  schema.add("polychromic.reward_pattern", polychromic.reward_pattern, "a pattern of PCRE2");
  schema.add("polychromic.reward_length", polychromic.reward_length, "length of an answer with the reward 1; 0 = none")
      .in("tokens")
      .at_least(0)
      .at_most(kMostTokens);
  schema
      .add("polychromic.reward_file", polychromic.reward_file,
           "JSON lines {\"prompt\": TEXT, \"answer\": TEXT, \"score\": NUMBER}")
      .path_name();
  schema.add("polychromic.reward_command", polychromic.reward_command,
             "a command of the shell that reads and writes JSON lines");
  schema
      .add("polychromic.reward_time_limit", polychromic.reward_time_limit,
           "time limit of reward_command for a batch of answers")
      .in("s")
      .more_than(0)
      .at_most(1e6)
      .free();
  const Settings& p = polychromic;
  add_reward_rule(schema, p, RewardKind::regex, "regex", "reward_pattern", [&p] { return !p.reward_pattern.empty(); });
  add_reward_rule(schema, p, RewardKind::length, "length", "reward_length", [&p] { return p.reward_length > 0; });
  add_reward_rule(schema, p, RewardKind::file, "file", "reward_file", [&p] { return !p.reward_file.empty(); });
  add_reward_rule(schema, p, RewardKind::command, "command", "reward_command",
                  [&p] { return !p.reward_command.empty(); });
  schema.rule({"polychromic.more_rewards", "polychromic.more_weights"}, [&p]() -> std::string {
    for (const std::string& name : p.more_rewards)
      if (reward_of(name) == std::end(kRewards))
        return fmt::format("polychromic.more_rewards: there is no reward \"{}\"; take names of polychromic.reward",
                           name);
    if (p.more_rewards.size() == p.more_weights.size() &&
        std::all_of(p.more_weights.begin(), p.more_weights.end(), [](double one) { return std::isfinite(one); }))
      return {};
    return fmt::format(
        "polychromic.more_weights has {} numbers for {} polychromic.more_rewards; give a finite one for each",
        p.more_weights.size(), p.more_rewards.size());
  });
}

void add_objective_keys(input::Schema& schema, Settings& polychromic) {
  schema
      .add("polychromic.weight", polychromic.weight,
           "factor of the objective of sets, which is added to the supervised loss; 0 = answers are measured only")
      .at_least(0)
      .at_most(1e6);
  schema
      .add("polychromic.epochs", polychromic.epochs,
           "steps that use a batch of answers, at most every; after the first the ratio of probabilities is clipped "
           "(PPO)")
      .in("steps")
      .at_least(1)
      .at_most(input::kMostSteps);
  schema
      .add("polychromic.clip", polychromic.clip,
           "a token has no gradient once its probability has changed by this fraction in the direction "
           "of the advantage")
      .more_than(0)
      .at_most(1)
      .only_with("polychromic.epochs", {}, "in one step the ratio of probabilities is 1");
  schema
      .add("polychromic.kl", polychromic.kl,
           "factor of the divergence from the initial model, estimated on the tokens of the answers; 0 = none")
      .at_least(0)
      .at_most(1e6);
  schema.add("polychromic.objective", polychromic.objective,
             {{"product", Objective::product},
              {"additive", Objective::additive},
              {"supervised", Objective::supervised},
              {"grpo", Objective::grpo},
              {"rloo", Objective::rloo},
              {"best_of_n", Objective::best_of_n}},
             "what training on answers raises: mean reward of a set times its diversity (product), or plus "
             "diversity_weight times diversity (additive); nothing, answers are measured only (supervised); the mean "
             "reward, relative to the mean of the prompt's answers (grpo) or of its other answers (rloo); the "
             "probability of a prompt's best answer (best_of_n)");
  schema
      .add("polychromic.standardise", polychromic.standardise,
           "true: advantages of a prompt are divided by the standard deviation of its rewards")
      .only_with("polychromic.objective", {"grpo"});
  schema.add("polychromic.diversity_weight", polychromic.diversity_weight, "factor of the diversity")
      .at_least(0)
      .at_most(1e6)
      .only_with("polychromic.objective", {"additive"});
  schema
      .add("polychromic.hold_reward", polychromic.hold_reward,
           {{"none", HoldReward::none}, {"initial", HoldReward::initial}, {"target", HoldReward::target}},
           "mean reward of the answers that is kept constant by changing the weight of the diversity (at first "
           "diversity_weight): none; that of the initial model; reward_target")
      .only_with("polychromic.objective", {"additive"},
                 "it changes the weight of the diversity, which a product does not have")
      .not_with("polychromic.reward", {"constant"}, "the reward is the same for all answers");
  schema.add("polychromic.reward_target", polychromic.reward_target, "the mean reward that is kept constant")
      .only_with("polychromic.hold_reward", {"target"});
  schema
      .add("polychromic.hold_gain", polychromic.hold_gain,
           "change of the logarithm of the weight per unit of reward above the target")
      .more_than(0)
      .at_most(1e6)
      .only_with("polychromic.hold_reward");
  schema
      .add("polychromic.hold_horizon", polychromic.hold_horizon,
           "number of batches after which a constant error has changed the weight once more")
      .in("batches of answers")
      .at_least(1)
      .at_most(input::kMostSteps)
      .only_with("polychromic.hold_reward");
  schema.add("polychromic.diversity", polychromic.diversity,
             {{"semantic", DiversityMeasure::semantic},
              {"distinct", DiversityMeasure::distinct},
              {"self_bleu", DiversityMeasure::self_bleu}},
             "distance of two answers: 1 - cosine of their embeddings; fraction of distinct bigrams; 1 - BLEU-2 "
             "of one against the other");
  schema
      .add("polychromic.embedder", polychromic.embedder,
           "model of the embeddings of answers: directory of a sentence encoder (model_type bert) saved by "
           "sentence-transformers; \"\" = the initial model")
      .path_name();
  schema
      .add("polychromic.semantic_weight", polychromic.semantic_weight,
           "factor of the semantic distance that is added to the diversity")
      .at_least(0)
      .at_most(1e6)
      .not_with("polychromic.diversity", {"semantic"});
}

void add_keys(input::Schema& schema, Settings& polychromic) {
  schema.table("polychromic", "weft lm polychromic: fine-tuning for quality and diversity of sets of answers.");
  add_sampling_keys(schema, polychromic);
  add_reward_keys(schema, polychromic);
  add_objective_keys(schema, polychromic);
  schema.rule({"polychromic.stop"}, [&polychromic]() -> std::string {
    if (std::count(polychromic.stop.begin(), polychromic.stop.end(), "") == 0) return {};
    return "polychromic.stop has an empty text (every answer would be empty); leave it out";
  });
  schema.rule({"polychromic.set_size", "polychromic.samples"}, [&polychromic]() -> std::string {
    if (polychromic.samples > polychromic.set_size || !polychromic.of_sets()) return {};
    return fmt::format(
        "polychromic.samples = {} is not more than polychromic.set_size = {} (all sets would have the same answers, "
        "and all advantages would be 0); take more samples",
        polychromic.samples, polychromic.set_size);
  });
  schema.rule({"polychromic.reward", "polychromic.prompts_file"}, [&polychromic]() -> std::string {
    if (!polychromic.needs_references() || is_named_json_lines(polychromic.prompts_file)) return {};
    return "polychromic.reward = \"exact\" or \"reference_likelihood\" needs references, which prompts of a FILE.jsonl "
           "have; give such a polychromic.prompts_file";
  });
  schema.rule({"polychromic.epochs", "polychromic.every"}, [&polychromic]() -> std::string {
    if (polychromic.epochs <= polychromic.every) return {};
    return fmt::format(
        "polychromic.epochs = {} is more than polychromic.every = {} (the next batch of answers would be "
        "drawn before); take fewer",
        polychromic.epochs, polychromic.every);
  });
  schema.rule({"polychromic.top_p", "polychromic.epochs", "polychromic.kl"}, [&polychromic]() -> std::string {
    if (polychromic.top_p == 1 || (polychromic.epochs == 1 && polychromic.kl == 0)) return {};
    return "polychromic.top_p with polychromic.epochs or polychromic.kl (they compare probabilities of two models, "
           "whose most probable tokens differ); set top_p to 1";
  });
  schema.rule({"polychromic.hold_reward", "polychromic.diversity_weight"}, [&polychromic]() -> std::string {
    if (polychromic.hold_reward == HoldReward::none || polychromic.diversity_weight > 0) return {};
    return "polychromic.hold_reward with diversity_weight = 0 (the weight is multiplied, and remains 0); give it a "
           "first value, 1 for example";
  });
}

}  // namespace

std::vector<std::pair<RewardKind, double>> Settings::rewards() const {
  std::vector<std::pair<RewardKind, double>> all = {{reward, 1.0}};
  for (std::size_t i = 0; i < std::min(more_rewards.size(), more_weights.size()); ++i)
    if (const auto* known = reward_of(more_rewards[i]); known != std::end(kRewards))  // others are errors of the schema
      all.emplace_back(known->second, more_weights[i]);
  return all;
}

bool Settings::uses(RewardKind kind) const {
  const auto all = rewards();
  return std::any_of(all.begin(), all.end(), [&](const auto& one) { return one.first == kind; });
}

input::Schema schema(Configuration& configuration) {
  input::Schema schema = language_model::schema(configuration);
  add_keys(schema, configuration.polychromic);
  return schema;
}

}  // namespace weft::polychromic
