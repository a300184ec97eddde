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
#include "language_model/evaluation.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/initial.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "language_model/trainer.hpp"
#include "privacy/account.hpp"
#include "run/trainable.hpp"

namespace weft::language_model {

/// The architecture that a configuration gives for a corpus: sizes of the data and of the initial model, whose longest
/// text is kept. Throws a collective Error(usage) if they do not fit.
Architecture architecture_of(const Configuration&, const Corpus&, const std::optional<InitialModel>&);

/// Description of the training data, for the log.
std::string summary(const Corpus&);

/// Settings of the samples that a run prints (log.sample_tokens).
GenerationSettings sample_settings(const Configuration&, const Architecture&);

/// The tokeniser of the model in a checkpoint: the tensor "tokenizer". None: the model was trained on token files
/// without one. Throws a collective Error(data) if its text is not that of a tokeniser. Collective.
std::optional<Tokenizer> stored_tokenizer(const checkpoint::Found&, const parallel::World&, const kernels::Execution&);

/// The tensor that stored_tokenizer reads. `text` is its memory and must outlive the registry.
checkpoint::Tensor tokenizer_tensor(std::vector<std::uint8_t>& text, bool writes);

/// The records of private training: disjoint segments of data.sequence + 1 ids, and the probability with which
/// each joins a step. Throws a collective Error(usage) if steps would have more records than there are.
struct PrivateRecords {
  std::int64_t count = 0;
  double expected = 0;  ///< records of a step
  double rate() const { return expected / static_cast<double>(count); }
};
PrivateRecords private_records(const Configuration&, std::int64_t train_tokens);

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
  const parallel::Communicator& data_ranks_;
  Trainer trainer_;
  std::optional<privacy::Account> account_;  // of private training
  model::StepArena sample_arena_;
  std::optional<Generator> generator_;   // of samples
  std::vector<std::uint8_t> tokenizer_;  // its text
  bool changed_ = false;
  std::int64_t token_ = 0;  // position in the data: tokens of all steps so far
  std::optional<EvaluationResult> validation_;
  std::string guarantee_;  // of a finished private run
  std::int64_t validated_step_ = -1;
};

}  // namespace weft::language_model
