// SPDX-License-Identifier: Apache-2.0
//
// One step of private training of a transcoder (privacy/private_step.hpp), and the state that a run carries from step
// to step. Adam is not fused with the backward pass. Ranks of the data axis hold different records and whole
// parameters.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "checkpoint/registry.hpp"
#include "dataset/activations/description.hpp"
#include "model/parameter_update.hpp"
#include "model/step_arena.hpp"
#include "model/step_runner.hpp"
#include "privacy/private_step.hpp"
#include "run/timers.hpp"
#include "transcoder/forward/forward.hpp"
#include "transcoder/private/example_pass.hpp"
#include "transcoder/private/records.hpp"

namespace weft::transcoder {

class PrivateTrainer : private privacy::PrivateModel {
 public:
  struct Buffers {
    /// row_bytes: bytes of one row of inputs (or targets) as stored.
    Buffers(const Configuration&, const Shape&, std::int64_t row_bytes, model::StepArena&);
    kernels::Array<std::byte> host_inputs, host_targets;  ///< [micro rows, row_bytes] as read
    kernels::Array<std::byte> raw_inputs, raw_targets;    ///< in memory of the kernels; on a host the same memory
    kernels::Array<std::int64_t> host_offsets, offsets;   ///< offsets of the records of a micro-batch
    kernels::Array<kernels::StepFlags> flags;             ///< [1]
    model::StepRunner::Buffers runner;
    privacy::ClippingBuffers clipping;
  };

  /// Requires that privacy.mode is not automatic. `stored`: type of the rows as stored. References must outlive the
  /// object. Throws a collective Error(usage) for a grid with a feature axis. Collective.
  PrivateTrainer(const Configuration&, const Shape&, const dataset::Normalisation&, const dataset::Statistics&,
                 const parallel::Grid&, const kernels::Execution&, kernels::Scalar stored);

  /// Sets the noise of all later steps. Must be called before the first step.
  void set_noise(const privacy::Noise& noise) { private_.set_noise(noise); }

  /// Initialises the parameters. A resumed run loads the registry instead.
  void initialise() { model_.initialise(static_cast<std::uint64_t>(configuration_.run.seed)); }

  /// Memory for the rows of a micro-batch, one record after the other.
  struct Rows {
    std::byte *inputs, *targets;
  };
  /// Reads the rows of records [first, first + count): read(first, count, rows).
  using Read = std::function<void(std::int64_t first, std::int64_t count, Rows)>;
  /// Makes one step on records of `lengths` rows on this rank, which may be none. Ranks may have different numbers of
  /// records. Collective. Throws Error(numeric) if the sum with its noise is not finite.
  void step(std::span<const std::int64_t> lengths, const Read& read);

  /// Waits for all steps, and completes the weights on this rank. Collective; throws as `step`.
  void wait();
  struct Metrics {
    double learning_rate = 0;
    double gradient_norm = 0;  ///< norm of the noisy gradient, before optimizer.clip_norm
    double clip_bound = 0;     ///< of the norms of records in the next step
  };
  /// Returns the metrics of the last step. Waits for the step.
  Metrics metrics();

  checkpoint::Registry& registry() { return registry_; }
  const Model& model() const { return model_; }
  const NormalisationOnDevice& normalisation() const { return normalisation_; }
  Forward& forward() { return forward_; }  ///< for evaluations
  const model::AccumulatingSink& gradients() const { return sink_; }
  const model::StepArena& memory() const { return arena_; }
  run::Timers& timers() { return timers_; }
  std::int64_t steps_done() const { return runner_.steps_done(); }
  void resume_at(std::int64_t step) { runner_.resume_at(step); }
  parallel::Exchanges exchanges() const { return update_.exchange().exchanges(); }
  std::int64_t step_bytes_sent() const { return runner_.step_traffic().bytes_sent; }

 private:
  void prepare_weights() override;
  privacy::MicroBatch load(std::int64_t first, std::int64_t count) override;
  void pass(parallel::Range records, model::GradientSink&) override;
  bool update(std::size_t parameter, kernels::Array<const float> gradient) override;
  model::StepRunner::Settings runner_settings() const;

  const Configuration configuration_;
  const kernels::Execution execution_;
  const kernels::Scalar stored_;
  run::Timers timers_;
  model::StepArena arena_;
  Model model_;
  NormalisationOnDevice normalisation_;
  Forward forward_;
  ExamplePass pass_;
  model::AccumulatingSink sink_;
  Buffers buffers_;
  model::ParameterUpdate update_;
  model::StepRunner runner_;
  privacy::PrivateStep private_;
  checkpoint::Registry registry_;
  // State of the present step, and of its present micro-batch.
  std::span<const std::int64_t> lengths_;
  const Read* read_ = nullptr;
  privacy::MicroBatch batch_;
};

/// Measures the memory that a PrivateTrainer takes, by purpose. Requires that privacy.mode is not automatic. Needs no
/// device and no ranks.
model::StepArena measure_private_step(const Configuration&, const Shape&, const parallel::GridShape&,
                                      std::int64_t row_bytes, kernels::Backend);

}  // namespace weft::transcoder
