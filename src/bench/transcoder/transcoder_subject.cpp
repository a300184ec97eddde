// SPDX-License-Identifier: Apache-2.0
#include "bench/transcoder/transcoder_subject.hpp"

#include <optional>
#include <vector>

#include "bench/transcoder/baselines.hpp"
#include "transcoder/private/records.hpp"
#include "transcoder/run/step_work.hpp"
#include "transcoder/step/trainer.hpp"
#ifndef WEFT_ENABLE_CUDA
#include "bench/transcoder/dense.hpp"
#endif

namespace weft::bench {
namespace {

std::unique_ptr<BatchesOfCase> batches_of(const transcoder::Configuration& configuration,
                                          const TranscoderSettings& settings, const parallel::World& world,
                                          const parallel::Grid& grid, const kernels::Execution& execution,
                                          int n_threads, std::unique_ptr<TrainingData> data) {
  if (data) return std::make_unique<StreamedBatches>(std::move(data), configuration, world, grid, n_threads);
  return std::make_unique<ResidentBatches>(
      transcoder::shape_of(configuration.transcoder, settings.layers, settings.d_model),
      configuration.data.batch_tokens, settings.batches, settings.zipf,
      static_cast<std::uint64_t>(configuration.run.seed), grid, execution, n_threads);
}

/// What both formulations have.
template <class AnyTrainer>
class TranscoderSubject : public BenchmarkSubject {
 public:
  TranscoderSubject(const transcoder::Configuration& configuration, const TranscoderSettings& settings,
                    const parallel::World& world, const parallel::Grid& grid, const kernels::Execution& execution,
                    int n_threads, std::unique_ptr<TrainingData> data)
      : configuration_(with_baselines(configuration, settings)),
        grid_(grid),
        execution_{device::planned_backend(device_settings(configuration)), execution.stream},
        batches_(batches_of(configuration_, settings, world, grid, execution, n_threads, std::move(data))),
        shape_(batches_->shape(configuration.transcoder)) {}

  void step() override {
    trainer_->step(batches_->next());
    batches_->release();
  }
  run::Timers& timers() override { return trainer_->timers(); }
  checkpoint::Registry& registry() override { return trainer_->registry(); }
  const kernels::Execution& execution() const override { return execution_; }
  std::int64_t tokens_per_step() const override { return configuration_.data.batch_tokens; }
  double row_bytes() const override { return 4 * static_cast<double>(shape_.width()); }  // bf16 inputs and targets
  std::int64_t state_bytes() const override { return trainer_->model().state_bytes(); }

 protected:
  const transcoder::Configuration configuration_;
  const parallel::Grid& grid_;
  const kernels::Execution execution_;
  const std::unique_ptr<BatchesOfCase> batches_;
  const transcoder::Shape shape_;
  std::optional<AnyTrainer> trainer_;
  transcoder::StepSizes sizes_;
};

class Sparse final : public TranscoderSubject<transcoder::Trainer> {
 public:
  using TranscoderSubject::TranscoderSubject;

  void build() override {
    trainer_.emplace(configuration_, shape_, batches_->normalisation(), batches_->statistics(), grid_, execution_,
                     batches_->row_bytes(),
                     [](const dataset::RawBatch&, std::int64_t) { return std::string("batch of a benchmark"); });
    trainer_->initialise();
    // Every step has as many records as a private step has on average.
    if (configuration_.privacy.enabled)
      trainer_->set_noise({.key = {}, .multiplier = 1, .expected = transcoder::expected_records(configuration_)});
  }
  void wait() override { trainer_->wait(); }
  parallel::Exchanges exchanges() const override { return trainer_->exchanges(); }
  double step_exposed_seconds() const override { return trainer_->step_exposed_seconds(); }
  void time_phases(bool one_by_one) override { trainer_->time_phases(one_by_one); }
  void count_work() override {
    // Private steps count no entries. Those of topk are at most k.
    const std::vector<double> most(static_cast<std::size_t>(shape_.n_layers), configuration_.transcoder.k);
    sizes_ = transcoder::step_sizes(configuration_, shape_, grid_,
                                    configuration_.privacy.enabled ? most : trainer_->metrics().l0);
    sizes_.stores_products = !trainer_->forms_products();
  }
  run::Work work_of(std::string_view phase) const override { return transcoder::work_of(phase, sizes_); }
  run::PhaseBytes phase_bytes() const override { return transcoder::phase_bytes(sizes_); }
  std::optional<double> loss() override {
    if (configuration_.privacy.enabled) return std::nullopt;
    return trainer_->metrics().loss;
  }
};

#ifndef WEFT_ENABLE_CUDA
/// One process on the host: nothing is exchanged, and every phase is timed.
class Dense final : public TranscoderSubject<DenseTrainer> {
 public:
  using TranscoderSubject::TranscoderSubject;

  void build() override {
    trainer_.emplace(configuration_, shape_, batches_->normalisation(), batches_->statistics(), grid_, execution_);
    trainer_->initialise();
  }
  void wait() override {}
  void time_phases(bool) override {}
  void count_work() override {
    sizes_ = transcoder::step_sizes(configuration_, shape_, grid_, {});
    sizes_.entries = static_cast<double>(trainer_->selection().statistics().entries);
  }
  run::Work work_of(std::string_view phase) const override { return dense_work_of(phase, sizes_); }
  run::PhaseBytes phase_bytes() const override { return dense_phase_bytes(sizes_); }
  std::optional<double> loss() override { return trainer_->loss(); }
};
#endif

}  // namespace

std::string obstacle(const transcoder::Configuration& configuration, const TranscoderSettings& settings,
                     const parallel::World& world) {
  if (settings.from == Batches::data && configuration.data.train.empty() && configuration.data.model.empty())
    return "benchmark.from = \"data\" needs data.train or data.model";
  if (settings.from == Batches::resident && !settings.prefetch)
    return "benchmark.prefetch = false has no effect on batches in memory; set benchmark.from = \"data\"";
  if (settings.formulation == Formulation::sparse) return "";
  if (configuration.privacy.enabled) return "the dense formulation has no private steps";
  if (kernels::activation_has_thresholds(configuration.transcoder.activation) || configuration.transcoder.sparsity > 0)
    return "the dense formulation has neither thresholds nor penalties";
#ifdef WEFT_ENABLE_CUDA
  static_cast<void>(world);
  return "the dense formulation is in builds without CUDA only";
#else
  return world.size() > 1 ? "the dense formulation is for one process" : "";
#endif
}

std::unique_ptr<BenchmarkSubject> transcoder_subject(const transcoder::Configuration& configuration,
                                                     const TranscoderSettings& settings, const parallel::World& world,
                                                     const parallel::Grid& grid, const kernels::Execution& execution,
                                                     int n_threads, std::unique_ptr<TrainingData> data) {
#ifndef WEFT_ENABLE_CUDA
  if (settings.formulation == Formulation::dense)
    return std::make_unique<Dense>(configuration, settings, world, grid, execution, n_threads, std::move(data));
#endif
  return std::make_unique<Sparse>(configuration, settings, world, grid, execution, n_threads, std::move(data));
}

}  // namespace weft::bench
