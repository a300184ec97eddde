// SPDX-License-Identifier: Apache-2.0
//
// One training step of a language model, and the state that a run carries from step to step.
//
// A step has one or more micro-batches. Their gradients are added in fp32; each loss is weighted by 1 / counted targets
// of the whole step, so that the division into micro-batches does not change the result but for rounding.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/registry.hpp"
#include "dataset/tokens/batches.hpp"
#include "language_model/staging.hpp"
#include "language_model/transformer.hpp"
#include "report/timers.hpp"
#include "training/parameter_update.hpp"
#include "training/step_arena.hpp"
#include "training/step_runner.hpp"
#include "training/tuning.hpp"

namespace weft::language_model {

class Trainer {
 public:
  struct Buffers {
    Buffers(const Configuration&, training::StepArena&);
    kernels::Array<float> losses;  ///< [tokens of a step] of the last step
    kernels::Array<kernels::StepFlags> flags;
    kernels::Array<kernels::LossScale> loss_scale;  ///< [1] with device.precision = "fp16", else empty
    kernels::Array<float> loss_factor;              ///< [1], likewise: scale / counted targets
    training::StepRunner::Buffers runner;
    training::LearningRateTuning::Buffers tuning;
  };

  /// References must outlive the object.
  Trainer(const Configuration&, const Architecture&, const parallel::Grid&, const kernels::Execution&);

  /// Fresh parameters. A resumed run loads the registry instead.
  void initialise();

  /// Memory of the next step's batch: data.batch_tokens in sequences of the length of that step.
  dataset::TokenBatch next_batch();
  /// One step on the batch that `next_batch` returned, filled. Throws Error(numeric) when loss or gradient of this step
  /// or one of the two before it are not finite (run.nonfinite).
  void step(const dataset::TokenBatch&);
  /// The same with this learning rate instead of the schedule's.
  void step_at_rate(const dataset::TokenBatch&, double learning_rate);

  struct Metrics {
    double loss = 0;  ///< mean over the counted targets, nats
    double learning_rate = 0;
    double gradient_norm = 0;  ///< before clipping
    std::int64_t skipped_steps = 0;
    double loss_scale = 0;  ///< of the next step; 0: the loss is not scaled
  };
  /// Of the last step. Waits for it.
  Metrics metrics();

  /// Waits for all steps; throws as `step`.
  void settle() { runner_.settle(); }

  /// All state of a run but that of its data.
  checkpoint::Registry& registry() { return registry_; }
  const Model& model() const { return model_; }
  Transformer& transformer() { return transformer_; }
  Staging& staging() { return staging_; }
  training::LearningRateTuning& tuning() { return tuning_; }
  const training::AccumulatingSink& gradients() const { return sink_; }
  std::int64_t steps_done() const { return runner_.steps_done(); }
  std::int64_t length() const { return length_; }  ///< of the sequences of the last step
  void resume_at(std::int64_t step) { runner_.resume_at(step); }
  report::Timers& timers() { return timers_; }
  /// true: steps run eagerly and wait for the device between phases, so that each is timed by itself.
  void time_phases(bool one_by_one);

 private:
  kernels::AdamStep constants() const;
  void reset_loss_scale();
  void step(const dataset::TokenBatch&, const kernels::AdamStep&);
  void compute();
  training::StepRunner::Settings runner_settings() const;

  const Configuration configuration_;
  const kernels::Execution execution_;
  report::Timers timers_;
  training::StepArena arena_;
  Model model_;
  Staging staging_;
  Transformer transformer_;
  training::AccumulatingSink sink_;
  Buffers buffers_;
  training::ParameterUpdate update_;
  training::StepRunner runner_;
  training::LearningRateTuning tuning_;
  checkpoint::Registry registry_;
  std::int64_t counted_ = 1;  // targets of the last step
  std::int64_t length_ = 0;   // of its sequences
};

/// The memory of a step, by purpose: what a Trainer takes. Needs no device.
training::StepArena measure_step(const Configuration&, const Architecture&, const parallel::GridShape&,
                                 kernels::Backend);

}  // namespace weft::language_model
