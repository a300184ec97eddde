// SPDX-License-Identifier: Apache-2.0
//
// A transcoder as a Trainable: batches of activations, the Trainer's steps, its metrics by name, and the measures on
// validation data.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dataset/activations/loader.hpp"
#include "device/runtime.hpp"
#include "run/run_directory.hpp"
#include "run/trainable.hpp"
#include "transcoder/run/evaluation.hpp"
#include "transcoder/settings/transcoder_settings.hpp"
#include "transcoder/step/trainer.hpp"

namespace weft::transcoder {

/// Training data and, if the input names them, validation data of the same model.
struct Datasets {
  dataset::Description train;
  std::optional<dataset::Description> validation;
};

/// Reads the headers of data.train and data.validation; or with `computed`, those of data.validation alone. Collective.
/// Throws a collective Error(data), also if they are not of one model.
Datasets describe_datasets(const dataset::Settings&, const parallel::World&, std::optional<Datasets> computed = {});

/// Returns the means over the layers of measures on validation data, as metrics of a step.
run::Metrics validation_metrics(const EvaluationResult&);

class TrainingRun final : public run::Trainable {
 public:
  /// Allocates the model; its normalisation comes from the checkpoint to resume from, that of transcoder.initial, or
  /// the training data. `initial`: the latter checkpoint, if any (require_initial). All references must outlive the
  /// object. Collective.
  TrainingRun(const Configuration&, const Datasets&, const run::OpenedRun&,
              const std::optional<checkpoint::Found>& initial, const parallel::World&, const parallel::Grid&,
              const device::Runtime&);

  std::string work_unit() const override { return "tokens"; }
  checkpoint::Registry& registry() override { return trainer_.registry(); }
  void initialise() override;
  void resume_at(std::int64_t step, const run::Cursor&) override;
  run::Cursor cursor() const override;

  void start() override;
  run::Step step() override;
  void stop() noexcept override { loader_.reset(); }

  void wait() override { trainer_.wait(); }
  run::Metrics metrics() override;
  run::Metrics evaluate() override;
  run::Communication communication() const override;
  run::Timers& timers() override { return trainer_.timers(); }
  std::vector<std::pair<std::string, double>> phase_bytes() override;
  void conclude(Json& result) override;

 private:
  /// Returns the place in the files of a value of this batch that is not finite; if there is none, the rows of the
  /// batch. Throws a collective Error(data) for such a value, unless such steps are skipped. Collective.
  std::string locate(const dataset::RawBatch&, std::int64_t step) const;
  /// Evaluates on the validation data, which must exist; once per step. Collective.
  const EvaluationResult& validate();
  bool validated() const { return validated_step_ == trainer_.steps_done(); }

  const Configuration& configuration_;
  const Datasets& data_;
  const std::optional<checkpoint::Found>& initial_;
  const parallel::World& world_;
  const parallel::Grid& grid_;
  const device::Runtime& runtime_;
  dataset::Statistics statistics_;
  Trainer trainer_;
  dataset::Cursor cursor_;
  std::int64_t tokens_;                    // tokens trained on since the beginning of the run
  std::optional<dataset::Loader> loader_;  // exists between `start` and `stop`
  decltype(run::Communication::rows) rows_;
  std::optional<EvaluationResult> validation_;  // measures after step `validated_step_`
  std::int64_t validated_step_ = -1;
  // Values of the step before the last evaluation, which overwrites them by using the same buffers and communicators.
  std::vector<double> step_l0_;
  double step_exposed_seconds_ = 0;
  parallel::Exchanges evaluation_exchanges_;  // exchanges of all evaluations
};

}  // namespace weft::transcoder
