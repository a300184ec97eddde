// SPDX-License-Identifier: Apache-2.0
//
// One training step, and the state that a run carries from step to step.
//
// step.cpp has the mathematics of a step, model/step_runner.hpp the launch of steps on a device, and
// model/step_arena.hpp their memory. The registry of a Trainer has all state of a run, which is saved
// and resumed; no other state survives a step.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/registry.hpp"
#include "dataset/activations/loader.hpp"
#include "device/stream.hpp"
#include "model/step_arena.hpp"
#include "model/step_runner.hpp"
#include "run/timers.hpp"
#include "transcoder/forward/forward.hpp"
#include "transcoder/parts/training_metrics.hpp"
#include "transcoder/step/step.hpp"

namespace weft::transcoder {

class Trainer {
 public:
  /// Describes the rows of the batch of a step without an update, for messages; or throws a collective Error. Called on
  /// all ranks.
  using Locate = std::function<std::string(const dataset::RawBatch&, std::int64_t step)>;

  struct Buffers {
    /// row_bytes: bytes of one token's inputs (or targets) as the loader delivers them, for data that must be sent to a
    /// GPU.
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t row_bytes, model::StepArena&);
    kernels::Array<std::int64_t> dead;  ///< [1]
    device::Upload::Slot raw_rows[2];   ///< [largest own slice, row_bytes]; on a GPU
    model::StepRunner::Buffers runner;
  };

  /// row_bytes: as for Buffers; 0 when all batches are resident. What is passed by reference must outlive this object.
  /// Collective.
  Trainer(const Configuration&, const Shape&, const dataset::Normalisation&, const dataset::Statistics&,
          const parallel::Grid&, const kernels::Execution&, std::int64_t row_bytes, Locate);

  /// Initialises the parameters. A resumed run loads the registry instead.
  void initialise();

  /// Makes one step on one batch, whose memory may be reused on return. Collective. Throws Error(numeric) when loss or
  /// gradient rows of this step or one of the two before it are not finite (run.nonfinite).
  void step(const dataset::RawBatch& batch);

  /// Private training (privacy.enabled; data.batch_tokens is the largest batch, largest_batch): noise of all steps, to
  /// be set before the first one.
  void set_noise(const privacy::Noise& noise) { step_.records()->set_noise(noise); }
  /// Sets the records of the next step: record b has the rows [offsets[b], offsets[b + 1]) of its whole batch. The same
  /// on all ranks. Without it, records follow one another in the batch and have privacy.record_rows rows.
  void set_records(std::vector<std::int64_t> offsets) { record_offsets_ = std::move(offsets); }
  /// Norm of the gradient of the last step, before clipping; with optimizer.clip_norm. Waits for the step.
  double gradient_norm();
  double clip_bound() { return step_.records()->clip_bound(); }  ///< of the next step; may wait for the last one

  /// Returns the metrics of the last step. Waits for the step. Collective.
  TrainingMetrics metrics();

  /// Waits for all steps, and completes the state on this rank for a checkpoint or an evaluation. Collective; throws as
  /// `step`.
  void wait();

  /// If `one_by_one` is true, the host waits between phases of later steps and isolates exchanges, so that each can be
  /// timed, and no graph is used. For benchmarks.
  void time_phases(bool one_by_one);

  checkpoint::Registry& registry() { return registry_; }
  const Model& model() const { return model_; }
  const NormalisationOnDevice& normalisation() const { return normalisation_; }
  std::int64_t steps_done() const { return runner_.steps_done(); }
  /// Sets the step of the loaded state after a resume.
  void resume_at(std::int64_t step) {
    runner_.resume_at(step);
    step_.parameters_changed();
  }
  run::Timers& timers() { return timers_; }
  Forward& forward() { return forward_; }
  /// Active features per token and layer that the last step kept (batch_topk, topk).
  double k() const { return k_; }
  double learning_rate() const { return learning_rate_; }  ///< rate of the last step
  /// Memory of this object's step, by purpose.
  const model::StepArena& memory() const { return arena_; }
  /// Selector::forms_products of the forward pass.
  bool forms_products() const { return forward_.selection().forms_products(); }
  parallel::Traffic feature_traffic() const { return runner_.exchanges()[kFeature].total(); }
  parallel::Traffic data_traffic() const { return runner_.exchanges()[kData].total(); }
  /// Exchanges of this rank and object: both axes, the selection, flags and norms.
  parallel::Exchanges exchanges() const;
  /// True if the `seconds` of exchanges are known: on GPUs only where phases are timed.
  bool traffic_is_timed() const { return world_.is_timed(); }
  /// Bytes that this rank sent in the last step.
  std::int64_t step_bytes_sent() const { return runner_.step_traffic().bytes_sent; }
  /// Seconds that the computation of the last step, which must be over (`wait`), waited for exchanges.
  double step_exposed_seconds() const;

 private:
  void keep_k();
  void load(const dataset::RawBatch&);
  void load_records(const dataset::RawBatch&);
  std::int64_t public_tokens(const dataset::RawBatch&);
  double error_divisor(std::int64_t n_tokens) const;
  enum ExchangeGroup : std::size_t { kFeature, kData, kOthers };
  model::StepRunner::ExchangeGroups counted_exchanges();
  model::StepRunner::Settings runner_settings() const;
  void name_state();

  const Configuration configuration_;
  const Locate locate_;
  const parallel::Grid& grid_;
  kernels::Execution execution_;
  run::Timers timers_;
  model::StepArena arena_;
  Model model_;
  NormalisationOnDevice normalisation_;
  Forward forward_;
  Buffers buffers_;
  parallel::DeviceCommunicator world_;  // flags, norms, gradients that all ranks sum
  device::Upload upload_;
  model::StepRunner runner_;
  Step step_;
  checkpoint::Registry registry_;
  std::vector<std::int64_t> record_offsets_;
  double learning_rate_ = 0;
  double k_ = 0;  // k of the last step
};

/// Measures the memory that a Trainer takes on the largest rank, by purpose. Needs no device and no ranks.
model::StepArena measure_step(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t row_bytes,
                              kernels::Backend);

}  // namespace weft::transcoder
