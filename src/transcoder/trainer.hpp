// SPDX-License-Identifier: Apache-2.0
//
// One training step, and the state that a run carries from step to step.
//
// The Trainer owns the registry of named tensors: what is in it is saved, resumed and planned for; nothing else
// survives a step.
//
// On a GPU the host only gives work: it runs up to two steps ahead, nothing in a step waits for an answer, and from the
// second step on the whole step is one recorded graph. What must be decided about a step (may it update, how is it
// clipped) is decided where the numbers are (kernels/optimize/guard.hpp); the host reads what became of it two steps
// later, and always before a checkpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/registry.hpp"
#include "dataset/activations/loader.hpp"
#include "device/stream.hpp"
#include "kernels/optimize/guard.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "report/timers.hpp"
#include "transcoder/exchange/data_axis.hpp"
#include "transcoder/forward.hpp"

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

  /// Active entries of the last step, of the features that a rank updates, over the ranks: features that fire often
  /// lie anywhere, and the step waits for the rank that has most.
  struct {
    double minimum = 0, mean = 0, maximum = 0;
  } entries_per_rank;
};

class Trainer {
 public:
  /// Says where the rows of a batch lie, for messages.
  using Locate = std::function<std::string(const dataset::RawBatch&)>;

  Trainer(const Configuration&, const Shape&, const dataset::Normalisation&, const dataset::Statistics&,
          const parallel::Grid&, const kernels::Execution&, Locate);

  /// Fresh parameters. A resumed run loads the registry instead.
  void initialise();

  /// Bytes of this class's own buffers on one rank, where the kernels run: for the memory plan.
  static std::int64_t bytes(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t row_bytes,
                            kernels::Backend);

  /// One step on one batch, whose memory is free again on return. Collective. Throws Error(numeric) when loss or
  /// gradient rows of this step or one of the two before it are not finite (run.nonfinite).
  void step(const dataset::RawBatch& batch);

  /// What the last step showed. Collective.
  TrainingMetrics metrics();

  /// Waits for all steps, and makes the state on this rank what a checkpoint and an evaluation must find. Collective;
  /// throws as `step`.
  void settle();

  /// Times phase by phase: the device is waited for between them, and no graph is used.
  void time_phases(bool one_by_one);

  checkpoint::Registry& registry() { return registry_; }
  const Model& model() const { return model_; }
  const NormalisationOnDevice& normalisation() const { return normalisation_; }
  std::int64_t steps_done() const { return steps_done_; }
  /// After a resume: the step that the loaded state stands at.
  void resume_at(std::int64_t step) { steps_done_ = steps_known_ = step; }
  report::Timers& timers() { return timers_; }
  Forward& forward() { return forward_; }
  double learning_rate() const { return learning_rate_; }  ///< of the last step
  parallel::Traffic feature_traffic() const { return traffic().feature.total(); }
  parallel::Traffic data_traffic() const { return traffic().data.total(); }
  /// Of this rank and object: both axes, the selection, flags and norms.
  parallel::Exchanges exchanges() const;
  /// Whether their `seconds` are known: not where steps go on without the host, unless phases are timed.
  bool traffic_is_timed() const { return world_.is_timed(); }
  /// By this rank in the last step.
  std::int64_t step_bytes_sent() const { return step_traffic_.bytes_sent; }
  /// That its computation stood still for exchanges in the last step, which must be over (`settle`).
  double step_exposed_seconds() const;

 private:
  float gradient_factor() const;
  kernels::AnyMatrix all_gradient_rows() const;  // [all tokens, L * d]
  kernels::AnyMatrix gradient_rows() const;      // [group tokens, L * d], of them
  /// What this rank's backward pass works on: the features it updates, over the tokens of the whole batch.
  const kernels::SparseActivations& activations() const;
  const kernels::FeatureHits& hits() const;
  std::int64_t n_keys() const { return model_.shape().n_layers * model_.owned().size(); }
  bool step_is_free_of_the_host();
  struct Traffics {
    parallel::Exchanges feature, data, others;
  };
  Traffics traffic() const;  // replayed steps included
  void load(const dataset::RawBatch&);
  void compute();
  void residual_and_loss();
  void order_by_feature();
  void await_gradient_rows();
  kernels::LateRows late_rows();
  void guard();
  void clip();
  void decoder_bias_gradient();
  void backward(const kernels::AdamStep* step);  // null: norms only
  void backward_and_update();
  void form_norm(bool rows_are_scaled);  // into gradient_norm_, from what `backward` left in squared_norm_. Collective
  void learn_outcomes(std::int64_t last);
  [[noreturn]] void refuse(const std::string& what, std::int64_t step) const;

  const Configuration configuration_;
  const Locate locate_;
  const parallel::Grid& grid_;
  kernels::Execution execution_;
  report::Timers timers_;
  Model model_;
  NormalisationOnDevice normalisation_;
  Forward forward_;
  RowGather row_gather_;  // gradient rows, over the feature axis
  DataAxis data_axis_;
  parallel::DeviceCommunicator world_;  // flags and norms

  device::Buffer<float> targets_;                // [largest own slice, L * d] normalised
  parallel::ExchangeBuffer gradient_rows_;       // [largest batch, L * d]; this group's in their place
  device::Buffer<float> activation_gradient_;    // by position in activations()
  device::Buffer<double> squared_norm_;          // decoder rows [L * owned], encoder rows [L * owned], their sum, the
                                                 // decoder bias, both together; then scratch. Clipping only
  device::Buffer<float> decoder_bias_gradient_;  // [L * d]
  device::Event rows_complete_, biases_formed_;
  device::Buffer<double> loss_sums_;  // [3 * L]
  device::Buffer<std::byte> loss_workspace_, backward_workspace_;
  device::Buffer<kernels::AdamStep> adam_step_;
  device::Buffer<std::int64_t> count_;
  device::Buffer<double> gradient_norm_;      // [1] of the last step, before clipping
  device::Buffer<kernels::StepGuard> guard_;  // [1]

  // What is on its way. Rings by step number.
  static constexpr std::int64_t kRing = kernels::kOutcomes;
  struct Pending {
    dataset::RawBatch batch;  // where it came from; its memory may be gone
    device::Event done;
  };
  const std::int64_t in_flight_;  // steps that the host may be ahead
  device::Upload upload_;
  device::HostBuffer<kernels::AdamStep> host_steps_;   // [kRing]
  device::HostBuffer<kernels::StepOutcome> outcomes_;  // [kRing]
  Pending pending_[kRing];
  device::Graph graph_;
  Traffics recorded_, replayed_;    // what the graph sends; what its replays have sent that no call was made for
  parallel::Traffic step_traffic_;  // of the last step
  bool one_by_one_ = false;
  bool decoder_is_ahead_ = false;  // this rank has updated what other ranks of the data axis do not have yet
  double learning_rate_ = 0;

  checkpoint::Registry registry_;
  std::int64_t steps_done_ = 0;       // given to the device
  std::int64_t steps_known_ = 0;      // of which the outcome has been read
  std::int64_t steps_here_ = 0;       // by this object
  device::Buffer<double> step_sums_;  // [4 * L] loss sums and active entries of the last step
};

}  // namespace weft::transcoder
