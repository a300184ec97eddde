// SPDX-License-Identifier: Apache-2.0
//
// One training step, and the state that a run carries from step to step.
//
// The Trainer owns the registry of named tensors: what is in it is saved, resumed and planned for; nothing else
// survives a step.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/registry.hpp"
#include "dataset/loader.hpp"
#include "report/timers.hpp"
#include "transcoder/forward.hpp"
#include "transcoder/gradient_exchange.hpp"

namespace weft::transcoder {

/// The last step, before its update; by layer where they are vectors. Of one step, not of an interval: so they are the
/// same in a run that was interrupted.
struct TrainingMetrics {
  double loss = 0;  ///< preset `weft`: sum over layers of the mean squared normalised error
  std::vector<double> layer_loss;
  std::vector<double> nmse_standardised;  ///< squared error over squared target, both standardised by the training set
  std::vector<double> l0;                 ///< active features a token
  double dead_fraction = 0;               ///< features silent for transcoder.dead_window tokens
  double gradient_norm = 0;               ///< of the last step, before clipping; 0 when not formed
  std::int64_t skipped = 0;               ///< steps without update, since the start of the run

  double nmse_standardised_mean() const;
  double l0_mean() const;
};

class Trainer {
 public:
  /// Says where the rows of a batch lie, for messages.
  using Locate = std::function<std::string(const dataset::RawBatch&)>;

  Trainer(const Configuration&, const Shape&, const dataset::Normalisation&, const dataset::Statistics&,
          const parallel::Grid&, const kernels::Execution&, Locate);

  /// Fresh parameters. A resumed run loads the registry instead.
  void initialise();

  /// One step on one batch. Collective. Throws Error(numeric) when loss or gradient rows are not finite
  /// (run.nonfinite).
  void step(const dataset::RawBatch& batch);

  /// What the last step showed. Collective.
  TrainingMetrics metrics();

  /// Makes the state on this rank what a checkpoint must hold (clocks agree over the data axis). Collective.
  void settle();

  checkpoint::Registry& registry() { return registry_; }
  const Model& model() const { return model_; }
  const NormalisationOnDevice& normalisation() const { return normalisation_; }
  std::int64_t steps_done() const { return steps_done_; }
  /// After a resume: the step that the loaded state stands at.
  void resume_at(std::int64_t step) { steps_done_ = step; }
  report::Timers& timers() { return timers_; }
  Forward& forward() { return forward_; }
  double learning_rate() const { return static_cast<double>(host_step_.learning_rate); }  ///< of the last step
  parallel::Traffic feature_traffic() const;
  parallel::Traffic data_traffic() const { return exchange_.traffic(); }

 private:
  kernels::AnyMatrix gradient_rows() const;  // [group tokens, L * d]
  void residual_and_loss(const dataset::RawBatch&);
  void gather_gradient_rows();
  bool update_is_safe(const dataset::RawBatch&);
  void clip();
  void decoder_bias_gradient();
  void backward(const kernels::AdamStep* step);  // null: norms only
  void backward_and_update();
  double global_norm();  // of what `backward` left in squared_norm_. Collective

  const Configuration configuration_;
  const Locate locate_;
  const parallel::Grid& grid_;
  kernels::Execution execution_;
  report::Timers timers_;
  Model model_;
  NormalisationOnDevice normalisation_;
  Forward forward_;
  parallel::DeviceCommunicator gather_;  // gradient rows, over the feature axis
  GradientExchange exchange_;            // parameter gradients, over the data axis

  device::Buffer<float> targets_;              // [largest own slice, L * d] normalised
  device::Buffer<std::byte> gradient_rows_;    // [largest group, L * d]
  device::Buffer<float> activation_gradient_;  // by CSR position
  device::Buffer<double>
      squared_norm_;  // [2 * L * F_local] decoder rows, then encoder rows; then scratch. Clipping only
  device::Buffer<float> encoder_bias_gradient_;  // [L * F_local]; with several data ranks only
  device::Buffer<float> decoder_bias_gradient_;  // [L * d]
  double decoder_bias_squared_norm_ = 0;
  device::Buffer<double> loss_sums_;  // [3 * L]
  device::Buffer<std::byte> loss_workspace_;
  device::Buffer<kernels::AdamStep> adam_step_;
  device::Buffer<std::int32_t> flag_;
  device::Buffer<std::int64_t> count_;
  kernels::AdamStep host_step_{};
  device::HostBuffer<double> previous_norm_;  // [1] gradient norm of the last step
  device::HostBuffer<std::int64_t> skipped_;  // [1]

  checkpoint::Registry registry_;
  std::int64_t steps_done_ = 0;
  std::int64_t step_tokens_ = 0;
  device::Buffer<double> step_sums_;  // [4 * L] loss sums and active entries of the last step
};

}  // namespace weft::transcoder
