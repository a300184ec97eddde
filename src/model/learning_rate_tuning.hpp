// SPDX-License-Identifier: Apache-2.0
//
// Applies optimizer.tuning to a model's steps, whatever the model:
//
//   LearningRateTuning tuning(settings, execution, buffers);      // buffers from the arena
//   tuning.add_to(registry, world.rank());                        // "optimizer/tuning"
//   tuning.initialise();                                          // with the model
//   tuning.apply(losses, scale, runner.constants());              // in each step, after the guard, before the update
//
// and, for "range", before the first step of a new run:
//
//   if (tuning.needs_range_test()) tuning.set_rate(range_test(registry, execution, step_at_rate));
#pragma once

#include <functional>

#include "checkpoint/registry.hpp"
#include "model/step_arena.hpp"
#include "optimizer/tuning.hpp"

namespace weft::model {

class LearningRateTuning {
 public:
  struct Buffers {
    Buffers() = default;
    /// n_losses: the most losses that `apply` takes.
    Buffers(const optimizer::Settings&, std::int64_t n_losses, StepArena&);
    // Each array is empty without tuning.
    kernels::Array<kernels::TuningState> state;  ///< [1]
    kernels::Array<double> sum;                  ///< [1] sum of the losses
    kernels::Array<double> workspace;            ///< workspace of the sum
  };

  /// `steps`: of the run, of which the warm-up may be a fraction.
  LearningRateTuning(const optimizer::Settings&, std::int64_t steps, const kernels::Execution&, const Buffers&);

  /// Registers the state, if there is tuning. Owned by rank 0, the same on all ranks.
  void add_to(checkpoint::Registry&, int world_rank) const;
  /// Sets the factor to 1.
  void initialise();
  /// Multiplies the learning rate of the step by the factor. The loss of the step is the sum of `losses` times *scale,
  /// 1 over the number of counted ones. No effect without tuning or if the step is withheld.
  void apply(kernels::Array<const float> losses, const float* scale, kernels::AdamStep* step) const;
  /// The present factor. Waits for the device.
  double factor() const;

  bool needs_range_test() const { return settings_.tuning == optimizer::Tuning::range; }
  /// `rate` takes the place of optimizer.learning_rate.
  void set_rate(double rate);

 private:
  void set_factor(double factor);

  const optimizer::Settings settings_;
  const kernels::TuningRule rule_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

/// Finds a learning rate by optimizer::RangeTest and restores the registered state; returns the rate. `step(rate)`
/// makes a step with this learning rate and returns its loss, the same on every rank; the caller then restores what is
/// not registered (step number, position in the data). A step that is not finite ends the sweep. Throws a collective
/// Error(usage) if the loss falls at no rate. Collective.
double range_test(const checkpoint::Registry& registry, const kernels::Execution& execution,
                  const std::function<double(double rate)>& step);

}  // namespace weft::model
