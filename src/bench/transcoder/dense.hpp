// SPDX-License-Identifier: Apache-2.0
//
// Baseline of `weft benchmark`: the training step of a dense trainer.
//
// Comparable: the same normalisation, exact selection, loss and Adam, the same BLAS and threads, one large product per
// source layer for each of encoder, decoder and their gradients. It stores what a dense trainer stores: the activations
// [N, F] of every layer, and the gradients of all parameters. One process, fp32, no clipping.
#pragma once

#include <vector>

#include "checkpoint/registry.hpp"
#include "dataset/activations/loader.hpp"
#include "run/timers.hpp"
#include "transcoder/forward/forward.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/run/step_work.hpp"
#include "transcoder/selection/drivers.hpp"

namespace weft::bench {

/// transcoder::work_of and phase_bytes of a dense step.
run::Work dense_work_of(std::string_view phase, const transcoder::StepSizes&);
run::PhaseBytes dense_phase_bytes(const transcoder::StepSizes&);

class DenseTrainer {
 public:
  /// Throws a collective Error(usage) for what the dense formulation does not support.
  DenseTrainer(const transcoder::Configuration&, const transcoder::Shape&, const dataset::Normalisation&,
               const dataset::Statistics&, const parallel::Grid&, const kernels::Execution&);

  void initialise() { model_.initialise(static_cast<std::uint64_t>(configuration_.run.seed)); }
  /// One step on one batch, as Trainer::step.
  void step(const dataset::RawBatch& batch);

  double loss() const { return loss_; }  ///< loss of the last step before its update, as TrainingMetrics::loss
  checkpoint::Registry& registry() { return registry_; }
  const transcoder::Model& model() const { return model_; }
  transcoder::Selector& selection() { return *selection_; }
  run::Timers& timers() { return timers_; }

 private:
  kernels::Matrix<float> activations(std::int64_t layer) const;  // [N, F]
  void encode(const dataset::RawBatch&);
  void decode_and_loss(const dataset::RawBatch&);
  void backward();
  void update();

  const transcoder::Configuration configuration_;
  kernels::Execution execution_;
  run::Timers timers_;
  transcoder::Model model_;
  transcoder::NormalisationOnDevice normalisation_;
  model::StepArena arena_;  // of the selection
  std::unique_ptr<transcoder::Selector> selection_;
  std::int64_t n_tokens_ = 0;

  device::Buffer<float> inputs_, targets_, reconstruction_, gradient_rows_;  // [N, L * d]
  device::Buffer<float> activations_;                                        // [L, N, F]
  device::Buffer<float> activation_gradient_;                                // [N, F]: one layer at a time
  std::vector<device::Buffer<float>> encoder_gradient_, decoder_gradient_;   // by layer
  device::Buffer<float> encoder_bias_gradient_, decoder_bias_gradient_;      // [L * F], [L * d]
  device::Buffer<double> loss_sums_;                                         // [3 * L]
  device::Buffer<std::byte> loss_workspace_, encode_workspace_;
  device::Buffer<std::int32_t> flag_;
  kernels::AdamStep adam_step_{};
  checkpoint::Registry registry_;
  std::int64_t steps_done_ = 0;
  double loss_ = 0;
};

}  // namespace weft::bench
