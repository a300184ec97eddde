// SPDX-License-Identifier: Apache-2.0
//
// Polychromic fine-tuning as a Trainable (arXiv 2509.25424; for language models arXiv 2604.17654): the steps of a
// TrainingRun, of which every polychromic.every-th also has the gradient of the objective of sets.
//
//   generate    N answers to each of P prompts, with the weights of training (they are shared, not copied)
//   embed       mean hidden states of the answers under the frozen model
//   reward      R_i
//   diversity   distances of pairs, advantages A_i of kernels/language/diversity/set_rule.hpp
//   backward    L = L_supervised - lambda / P sum_i n / (N - n) A_i sum_t log p(y_it)
//
// Of polychromic.epochs steps that use a batch, those after the first weight each token with its ratio of probabilities
// to those of the first, and with 0 beyond the clip (PPO: Schulman et al. 2017). With polychromic.kl the loss also
// has the mean over answers of sum_t r - log r - 1, r = p_frozen / p (Schulman 2020).
//
// All gradients are added up and applied by one update. The sets of a prompt exclude empty answers: N is
// then the number of the others. Prompts are divided over the groups of parallel.tensor ranks, all of which draw the
// same answers; which ones depends on the number of a prompt, not on its ranks.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "language_model/run/language_training_run.hpp"
#include "language_model/run/memory_plan.hpp"
#include "polychromic/answer_measures.hpp"
#include "polychromic/answers.hpp"
#include "polychromic/policy_batch.hpp"
#include "polychromic/reward_constraint.hpp"

namespace weft::polychromic {

/// Throws, known to all ranks, Error(usage) if a run with these settings is not possible. Collective.
void require_settings(const Configuration&, const language_model::Architecture&, const Prompts&,
                      const language_model::Tokenizer&, const parallel::World&);

/// Adds the memory of a PolychromicRun to the plan of its TrainingRun.
void add_memory(language_model::Plan&, const Configuration&, const Prompts&);

class PolychromicRun final : public run::Trainable {
 public:
  /// Arguments as for TrainingRun. The prompts must outlive the object.
  PolychromicRun(const Configuration&, const language_model::Corpus&, const Prompts&, const checkpoint::Found* found,
                 const parallel::World&, const parallel::Grid&, const device::Runtime&);

  std::string work_unit() const override { return base_.work_unit(); }
  checkpoint::Registry& registry() override { return base_.registry(); }
  void initialise() override { base_.initialise(); }
  void resume_at(std::int64_t step, const run::Cursor& cursor) override { base_.resume_at(step, cursor); }
  run::Cursor cursor() const override { return base_.cursor(); }

  void start() override;
  run::Step step() override;
  void wait() override { base_.wait(); }
  run::Metrics metrics() override;
  run::Metrics evaluate() override;
  run::Communication communication() const override { return base_.communication(); }
  run::Timers& timers() override { return base_.timers(); }
  std::vector<std::pair<std::string, double>> phase_bytes() override;
  void conclude(Json& result) override;

 private:
  bool draws_at(std::int64_t step) const { return step % settings_.every == 0; }
  bool trains_at(std::int64_t step) const {
    return settings_.trains() && step >= settings_.every && step % settings_.every < settings_.epochs;
  }
  void begin_constraint();
  void draw(std::int64_t step);
  std::vector<PolicyRow> rows() const;
  void weigh(bool first_use);
  void note_probabilities();
  void add_measures(AnswerMeasures&, std::vector<Prompt>, std::int64_t first, Json* texts);
  AnswerMeasures measure(Json* samples);
  Json record();
  void write(const Json&) const;
  void keep_reference(const checkpoint::Found* found);

  const Configuration& configuration_;
  const Settings& settings_;
  const Prompts& prompts_;
  const language_model::Tokenizer& tokenizer_;
  const parallel::World& world_;
  const kernels::Execution execution_;
  const parallel::Communicator& groups_;  // of parallel.tensor ranks: the ranks with the same part of the model
  const bool leads_;                      // one rank of each group
  const parallel::Range own_;             // prompts of a batch whose answers this group draws
  language_model::TrainingRun base_;
  model::StepArena arena_;
  Judge judge_;
  language_model::Generator generator_;
  PolicyBatch batch_;
  /// The answers of this group in the present batch: state of the run if several steps use it.
  struct Present {
    Present(std::int64_t answers, std::int64_t longest_);
    void add_to(checkpoint::Registry&, parallel::Range own, std::int64_t all, bool writes);
    std::int64_t longest;
    std::vector<std::uint32_t> tokens;  ///< [answers, longest] prompt, then answer
    std::vector<std::int64_t> sizes;    ///< [answers, 2] tokens of both
    std::vector<float> factors;         ///< [answers] lambda / P n / (N - n) A_i
    std::vector<float> first;           ///< [answers, longest] log p of each token of the answer at the first use
  } present_;
  std::vector<std::uint8_t> reference_;        // digest of the frozen weights
  std::vector<std::vector<float>> log_drawn_;  // of `present_`, after `draw`
  AnswerMeasures measures_;                    // since the last line of metrics.jsonl
  RewardConstraint constraint_;                // of settings_.holds_reward()
};

}  // namespace weft::polychromic
