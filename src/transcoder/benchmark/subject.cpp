// SPDX-License-Identifier: Apache-2.0
#include "transcoder/benchmark/subject.hpp"

#include <optional>

#include "transcoder/benchmark/data.hpp"
#include "transcoder/benchmark/work.hpp"
#include "transcoder/trainer.hpp"
#ifndef WEFT_ENABLE_CUDA
#include "transcoder/benchmark/dense.hpp"
#endif

namespace weft::transcoder {
namespace {

/// What both formulations have.
template <class AnyTrainer>
class Subject : public training::BenchmarkSubject {
 public:
  Subject(const Configuration& configuration, const BenchmarkSettings& settings, const parallel::Grid& grid,
          const kernels::Execution& execution, int n_threads)
      : configuration_(configuration),
        grid_(grid),
        execution_{device::planned_backend(device_settings(configuration)), execution.stream},
        shape_(shape_of(configuration.transcoder, settings.layers, settings.d_model)),
        batches_(shape_, configuration.data.batch_tokens, settings.batches, settings.zipf,
                 static_cast<std::uint64_t>(configuration.run.seed), grid, execution, n_threads) {}

  void step() override { trainer_->step(batches_.next()); }
  report::Timers& timers() override { return trainer_->timers(); }
  checkpoint::Registry& registry() override { return trainer_->registry(); }
  const kernels::Execution& execution() const override { return execution_; }
  std::int64_t tokens_per_step() const override { return configuration_.data.batch_tokens; }
  double row_bytes() const override { return 4 * static_cast<double>(shape_.width()); }  // bf16 inputs and targets
  std::int64_t state_bytes() const override { return trainer_->model().state_bytes(); }

 protected:
  const Configuration& configuration_;
  const parallel::Grid& grid_;
  const kernels::Execution execution_;
  const Shape shape_;
  ResidentBatches batches_;
  std::optional<AnyTrainer> trainer_;
  StepSizes sizes_;
};

class Sparse final : public Subject<Trainer> {
 public:
  using Subject::Subject;

  void build() override {
    trainer_.emplace(configuration_, shape_, batches_.normalisation(), batches_.statistics(), grid_, execution_, 0,
                     [](const dataset::RawBatch&, std::int64_t) { return std::string("resident batch"); });
    trainer_->initialise();
  }
  void settle() override { trainer_->settle(); }
  parallel::Exchanges exchanges() const override { return trainer_->exchanges(); }
  double step_exposed_seconds() const override { return trainer_->step_exposed_seconds(); }
  void time_phases(bool one_by_one) override { trainer_->time_phases(one_by_one); }
  void count_work() override {
    sizes_ = step_sizes(configuration_, shape_, grid_, trainer_->metrics().l0);
    sizes_.stores_products = !trainer_->forms_products();
  }
  training::Work work_of(std::string_view phase) const override {
    return transcoder::work_of(phase, Formulation::sparse, sizes_);
  }
  training::PhaseBytes phase_bytes() const override { return transcoder::phase_bytes(Formulation::sparse, sizes_); }
  std::optional<double> loss() override { return trainer_->metrics().loss; }
};

#ifndef WEFT_ENABLE_CUDA
/// One process on the host: nothing is exchanged, and every phase is timed.
class Dense final : public Subject<DenseTrainer> {
 public:
  using Subject::Subject;

  void build() override {
    trainer_.emplace(configuration_, shape_, batches_.normalisation(), batches_.statistics(), grid_, execution_);
    trainer_->initialise();
  }
  void settle() override {}
  parallel::Exchanges exchanges() const override { return {}; }
  double step_exposed_seconds() const override { return 0; }
  void time_phases(bool) override {}
  void count_work() override {
    sizes_ = step_sizes(configuration_, shape_, grid_, {});
    sizes_.entries = static_cast<double>(trainer_->selection().statistics().entries);
  }
  training::Work work_of(std::string_view phase) const override {
    return transcoder::work_of(phase, Formulation::dense, sizes_);
  }
  training::PhaseBytes phase_bytes() const override { return transcoder::phase_bytes(Formulation::dense, sizes_); }
  std::optional<double> loss() override { return trainer_->loss(); }
};
#endif

}  // namespace

std::string obstacle(const Configuration& configuration, const BenchmarkSettings& settings,
                     const parallel::World& world) {
  if (configuration.privacy.enabled) return "private steps of a transcoder have no benchmark (privacy.enabled)";
  if (settings.formulation == Formulation::sparse) return "";
  if (configuration.transcoder.activation == Activation::jumprelu || configuration.transcoder.sparsity > 0)
    return "the dense formulation has neither thresholds nor penalties";
#ifdef WEFT_ENABLE_CUDA
  static_cast<void>(world);
  return "the dense formulation is in builds without CUDA only";
#else
  return world.size() > 1 ? "the dense formulation is for one process" : "";
#endif
}

std::unique_ptr<training::BenchmarkSubject> benchmark_subject(const Configuration& configuration,
                                                              const BenchmarkSettings& settings,
                                                              const parallel::Grid& grid,
                                                              const kernels::Execution& execution, int n_threads) {
#ifndef WEFT_ENABLE_CUDA
  if (settings.formulation == Formulation::dense)
    return std::make_unique<Dense>(configuration, settings, grid, execution, n_threads);
#endif
  return std::make_unique<Sparse>(configuration, settings, grid, execution, n_threads);
}

}  // namespace weft::transcoder
