// SPDX-License-Identifier: Apache-2.0
//
// A language model as a Trainable: batches of tokens, the Trainer's steps, its metrics by name, evaluation on the
// validation data and samples of its text.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/resume.hpp"
#include "device/runtime.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/run/initial_model.hpp"
#include "language_model/run/private_plan.hpp"
#include "language_model/run/text_evaluation.hpp"
#include "language_model/step/language_trainer.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "privacy/account.hpp"
#include "run/trainable.hpp"

namespace weft::language_model {

/// The architecture that a configuration gives for a corpus: sizes of the data and of the initial model, whose longest
/// text is kept. Throws a collective Error(usage) if they do not fit.
Architecture architecture_of(const Configuration&, const Corpus&, const std::optional<InitialModel>&);

/// Description of the training data, for the log.
std::string summary(const Corpus&);

class TrainingRun final : public run::Trainable {
 public:
  /// Allocates the model. `found`: the checkpoint to resume from; throws a collective Error(usage) if it has another
  /// tokeniser than the corpus. All references must outlive the object. Collective.
  TrainingRun(const Configuration&, const Corpus&, const checkpoint::Found* found, const parallel::World&,
              const parallel::Grid&, const device::Runtime&);

  std::string work_unit() const override { return "tokens"; }
  checkpoint::Registry& registry() override { return trainer_.registry(); }
  void initialise() override;
  void resume_at(std::int64_t step, const run::Cursor&) override;
  run::Cursor cursor() const override { return {{"token", token_}}; }

  run::Step step() override;
  void wait() override { trainer_.wait(); }
  run::Metrics metrics() override;
  run::Metrics evaluate() override;
  run::Communication communication() const override;
  run::Timers& timers() override { return trainer_.timers(); }
  std::vector<std::pair<std::string, double>> phase_bytes() override;
  void conclude(Json& result) override;
  std::string last_line() const override { return guarantee_; }

  /// Notes, before `resume_at`, that the input has changed in a way that changes later steps
  /// (run::check_same_run).
  void note_change() { changed_ = true; }

  Trainer& trainer() { return trainer_; }

 private:
  run::Step private_step();
  void find_learning_rate();
  const EvaluationResult& validate();
  void print_sample();

  const Configuration& configuration_;
  const Corpus& corpus_;
  const parallel::World& world_;
  const kernels::Execution execution_;
  dataset::TokenBatches batches_;
  std::optional<dataset::Segments> validation_segments_;
  const parallel::Communicator& data_ranks_;
  Trainer trainer_;
  std::optional<privacy::Account> account_;  // of private training
  PrivateRecords records_;
  model::StepArena sample_arena_;
  std::optional<Generator> generator_;   // of samples
  std::vector<std::uint8_t> tokenizer_;  // its text
  bool changed_ = false;
  std::int64_t token_ = 0;  // position in the data: tokens of all steps so far
  std::optional<EvaluationResult> validation_;
  std::string guarantee_;  // of a finished private run
  std::int64_t validated_step_ = -1, sampled_step_ = -1;
};

}  // namespace weft::language_model
