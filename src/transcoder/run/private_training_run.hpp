// SPDX-License-Identifier: Apache-2.0
//
// Private training of a transcoder as a Trainable: Poisson samples of records, the steps of a Trainer, the account,
// and the measures on validation data. Training losses are not written: no noise protects them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dataset/activations/reader.hpp"
#include "device/runtime.hpp"
#include "privacy/account.hpp"
#include "run/run_directory.hpp"
#include "run/trainable.hpp"
#include "transcoder/private/records.hpp"
#include "transcoder/run/training_run.hpp"
#include "transcoder/step/trainer.hpp"

namespace weft::transcoder {

class PrivateTrainingRun final : public run::Trainable {
 public:
  /// Allocates the model; its normalisation comes from the checkpoint to resume from or else from the validation data.
  /// `changed`: run::check_same_run. All references must outlive the object. Collective. Throws a collective
  /// Error(usage) for steps of more records than there are.
  PrivateTrainingRun(const Configuration&, const Datasets&, const run::OpenedRun&, bool changed, const parallel::World&,
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

 private:
  void read(std::span<const std::int64_t> records, std::span<const std::int64_t> offsets, parallel::Range own);
  const EvaluationResult& validate();

  const Configuration& configuration_;
  const Datasets& data_;
  const parallel::World& world_;
  const parallel::Grid& grid_;
  const device::Runtime& runtime_;
  const bool changed_;
  const RecordTable records_;
  dataset::Statistics statistics_;  // statistics of the validation data
  const Configuration largest_;     // with_largest_batch
  Trainer trainer_;
  privacy::Account account_;
  dataset::Reader reader_;
  device::HostBuffer<std::byte> inputs_, targets_;  // own rows of a step
  std::int64_t token_ = 0;                          // expected tokens of all steps so far
  std::optional<EvaluationResult> validation_;
  std::string guarantee_;  // text for a finished private run
  std::int64_t validated_step_ = -1;
};

}  // namespace weft::transcoder
