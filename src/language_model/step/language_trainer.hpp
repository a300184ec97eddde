// SPDX-License-Identifier: Apache-2.0
//
// One training step of a language model, and the state that a run carries from step to step.
//
// A step has one or more micro-batches. Their gradients are added in fp32; each loss is weighted by 1 / counted targets
// of the whole step, so that the division into micro-batches does not change the result but for rounding.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "checkpoint/registry.hpp"
#include "dataset/tokens/batches.hpp"
#include "language_model/step/staging.hpp"
#include "language_model/step/transformer.hpp"
#include "model/learning_rate_tuning.hpp"
#include "model/parameter_update.hpp"
#include "model/step_arena.hpp"
#include "model/step_runner.hpp"
#include "privacy/private_step.hpp"
#include "run/timers.hpp"

namespace weft::language_model {

class Trainer : private privacy::PrivateModel {
 public:
  struct Buffers {
    /// `part`: of the model, on a rank (part_of).
    Buffers(const Configuration&, const Architecture& part, model::StepArena&);
    kernels::Array<float> losses;  ///< [tokens of a step] of the last step
    kernels::Array<kernels::StepFlags> flags;
    kernels::Array<kernels::LossScale> loss_scale;  ///< [1] with device.precision = "fp16", else empty
    kernels::Array<float> loss_factor;              ///< [1], likewise: scale / counted targets
    model::StepRunner::Buffers runner;
    model::LearningRateTuning::Buffers tuning;
    privacy::ClippingBuffers clipping;  ///< of private training
  };
  /// The exchanges along the tensor axis; null: one rank has the whole model.
  model::TensorAxis* tensor() { return tensor_ ? &*tensor_ : nullptr; }
  /// Buffers of these exchanges.
  static model::TensorAxis::Buffers tensor_buffers(const Configuration&, const Architecture&,
                                                   const parallel::GridShape&, model::StepArena&);

  /// privacy.mode of a private run is not automatic unless privacy.algorithm is naive. References must outlive the
  /// object.
  Trainer(const Configuration&, const Architecture&, const parallel::Grid&, const kernels::Execution&);

  /// Sets the noise of all private steps. Call it before the first one.
  void set_noise(const privacy::Noise& noise) { private_->set_noise(noise); }

  /// Initialises the parameters. A resumed run loads the registry instead.
  void initialise();

  /// Memory of this rank's part of the next step's batch: of data.batch_tokens in sequences of the length of that step,
  /// those from `first_sequence` on.
  dataset::TokenBatch next_batch();
  std::int64_t first_sequence() const { return sequences(configuration_.data.length_at(steps_done() + 1)).begin; }
  /// Exchanges between the ranks since the start.
  parallel::Exchanges exchanges() const;
  std::int64_t step_bytes_sent() const { return runner_.step_traffic().bytes_sent; }
  bool exchanges_are_timed() const {
    return (!update_.exchange().active() || update_.exchange().is_timed()) && (!tensor_ || tensor_->is_timed());
  }
  /// Time that the computation of the last step waited for exchanges. Its work must be complete.
  double step_exposed_seconds() const {
    return exchanges_are_timed() ? runner_.step_traffic().seconds : update_.exchange().idle().seconds();
  }

  /// One step on the batch that `next_batch` returned, filled. Collective. Throws Error(numeric) when loss or gradient
  /// of this step or one of the two before it are not finite (run.nonfinite).
  void step(const dataset::TokenBatch&);
  /// Function fill(number of the first sequence, batch) that fills a batch.
  using Fill = std::function<void(std::int64_t first, dataset::TokenBatch&)>;
  /// One step of private training (privacy/private_step.hpp) on `examples` sequences on this rank, which may be none:
  /// in micro-batches of at most data.micro_tokens, filled by `fill`. Collective.
  void private_step(std::int64_t examples, const Fill& fill);
  /// The same on records of so many sequences each, which is more than one only if privacy.unit joins sequences. `fill`
  /// gets the number of the first sequence.
  void private_step(std::span<const std::int64_t> sequences, const Fill& fill);
  /// One `step` with this learning rate instead of the schedule's.
  void step_at_rate(const dataset::TokenBatch&, double learning_rate);

  /// Function that is called in steps before their micro-batches: gives the sink the gradients of a further objective,
  /// with forward and backward passes of `transformer()`, each with a call of `between` after its forward pass. The
  /// gradients of all ranks are added up. With parallel.shard = "gradients" all ranks have equally many passes.
  using Objective =
      std::function<void(const kernels::AdamStep*, model::GradientSink&, const std::function<void()>& between)>;
  /// Sets the objective of later steps; empty: none. Waits for earlier steps if an objective is added or removed.
  void add_objective(Objective);

  struct Metrics {
    double loss = 0;  ///< mean over the counted targets, nats; 0 of a private step
    double learning_rate = 0;
    double gradient_norm = 0;  ///< before clipping
    std::int64_t skipped_steps = 0;
    double loss_scale = 0;  ///< of the next step; 0: the loss is not scaled
    double clip_bound = 0;  ///< of the norms of records in the next step; 0: not private
  };
  /// Metrics of the last step. Waits for it.
  Metrics metrics();

  /// Waits for all steps; throws as `step`.
  void wait() { runner_.wait(); }

  /// All state of a run but that of its data.
  checkpoint::Registry& registry() { return registry_; }
  const Model& model() const { return model_; }
  Transformer& transformer() { return transformer_; }
  Staging& staging() { return staging_; }
  const parallel::Communicator& ranks() const { return ranks_; }  ///< of the data axis
  model::LearningRateTuning& tuning() { return tuning_; }
  privacy::PrivateStep& private_steps() { return *private_; }  ///< of private training
  /// Settings of privacy, with the mode of its steps.
  const privacy::Settings& privacy() const { return configuration_.privacy; }
  const model::AccumulatingSink& gradients() const { return sink_; }
  std::int64_t steps_done() const { return runner_.steps_done(); }
  std::int64_t length() const { return length_; }  ///< of the sequences of the last step
  /// The registry has been loaded with the state after this step.
  void resume_at(std::int64_t step);
  run::Timers& timers() { return timers_; }
  /// true: steps run eagerly and wait for the device between phases, so that each is timed by itself.
  void time_phases(bool one_by_one);

 private:
  kernels::AdamStep constants() const;
  void reset_loss_scale();
  void step(const dataset::TokenBatch&, const kernels::AdamStep&);
  void begin_exchanges();
  void end_exchanges();
  void compute();
  void prepare_weights() override { transformer_.prepare_weights(); }
  privacy::MicroBatch load(std::int64_t first, std::int64_t count) override;
  void pass(parallel::Range examples, model::GradientSink&) override;
  model::StepRunner::Settings runner_settings();
  parallel::Range sequences(std::int64_t length) const;  // of a step, on this rank
  parallel::Range sequences_of(parallel::Range records) const;
  void gather_losses(std::int64_t length);

  const Configuration configuration_;
  const kernels::Execution execution_;
  run::Timers timers_;
  model::StepArena arena_;
  const model::WeightSlots slots_;  // empty: weights are not gathered
  Model model_;
  Staging staging_;
  std::optional<model::TensorAxis> tensor_;  // empty: one rank has the whole model
  Transformer transformer_;
  model::AccumulatingSink sink_;
  Buffers buffers_;
  model::ParameterUpdate update_;
  const parallel::Communicator& ranks_;  // of the data axis
  model::StepRunner runner_;
  std::optional<privacy::PrivateStep> private_;
  const Fill* fill_ = nullptr;           // of the present private step
  std::vector<std::int64_t> sequences_;  // of its records
  parallel::Range micro_batch_;          // records
  std::int64_t sent_ = 0;                // micro-batches of private steps
  model::LearningRateTuning tuning_;
  checkpoint::Registry registry_;
  std::int64_t counted_ = 1;  // targets of the last step
  std::int64_t length_ = 0;   // of its sequences
  Objective objective_;
};

/// Weights that ranks gather from the owners of their rows: copies in fp16 are made of whole weights, all other
/// products read the upper plane.
model::GatheredWeights gathered_weights(const Configuration&);
/// Gradients and weights that ranks keep with parallel.shard.
model::KeptGradients kept_gradients(const Configuration&);
model::StoredWeights stored_weights(const Configuration&);

/// Memory of a step in a Trainer, by purpose, with settings as there. Needs no device.
model::StepArena measure_step(const Configuration&, const Architecture&, const parallel::GridShape&, kernels::Backend);

}  // namespace weft::language_model
