// SPDX-License-Identifier: Apache-2.0
//
// One training step, and the state that a run carries from step to step.
//
// The Trainer holds the mathematics of a step (`compute`). How steps are given to a device is training/step_runner.hpp;
// where their memory comes from, training/step_arena.hpp. Its registry names all state of a run: what is in it is saved
// and resumed; no other state survives a step.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/registry.hpp"
#include "dataset/activations/loader.hpp"
#include "device/stream.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "report/timers.hpp"
#include "training/step_arena.hpp"
#include "training/step_runner.hpp"
#include "transcoder/auxiliary.hpp"
#include "transcoder/decoding.hpp"
#include "transcoder/error_weights.hpp"
#include "transcoder/exchange/data_axis.hpp"
#include "transcoder/forward.hpp"
#include "transcoder/gradient_norm.hpp"
#include "transcoder/initial_bias.hpp"
#include "transcoder/jump_backward.hpp"
#include "transcoder/penalties.hpp"
#include "transcoder/resampling.hpp"
#include "transcoder/training_metrics.hpp"

namespace weft::transcoder {

class Trainer {
 public:
  /// Describes the rows of the batch of a step without an update, for messages; or throws a collective Error. Called on
  /// all ranks.
  using Locate = std::function<std::string(const dataset::RawBatch&, std::int64_t step)>;

  struct Buffers {
    /// row_bytes: of one token's inputs (or targets) as the loader delivers them, for rows that a GPU has to be sent.
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t row_bytes,
            training::StepArena&);
    kernels::Array<float> targets;  ///< [largest own slice, L * d] normalised
    /// [largest batch, L * d]; this group's in their place. With dead features (auxiliary.hpp) theirs come after them.
    parallel::ExchangeBuffer gradient_rows;
    RowGather::Buffers own_gradient_rows;
    kernels::Array<float> activation_gradient;    ///< by position in the sparse activations
    kernels::Array<float> decoder_bias_gradient;  ///< [L * d]
    kernels::Array<float> pair_bias;              ///< [L * d]; with DecoderBias::pair
    kernels::Array<float> skip_gradient;          ///< [L * d, d]; empty without a skip connection
    kernels::Array<double> loss_sums;             ///< [3 * L], of a chunk
    kernels::Array<double> step_sums;             ///< [4 * L], MetricSums of the last step
    kernels::Array<std::int64_t> dead;            ///< [1]
    kernels::Array<std::byte> loss_workspace, skip_workspace, encoder_workspace;
    DecoderBackward::Buffers decoder;
    device::Upload::Slot raw_rows[2];  ///< [largest own slice, row_bytes]; on a GPU
    GradientNorm::Buffers norm;
    training::StepRunner::Buffers runner;
  };

  /// row_bytes: as for Buffers; 0 when all batches are resident. What is passed by reference must outlive this object.
  /// Collective.
  Trainer(const Configuration&, const Shape&, const dataset::Normalisation&, const dataset::Statistics&,
          const parallel::Grid&, const kernels::Execution&, std::int64_t row_bytes, Locate);

  /// Fresh parameters. A resumed run loads the registry instead.
  void initialise();

  /// One step on one batch, whose memory is free again on return. Collective. Throws Error(numeric) when loss or
  /// gradient rows of this step or one of the two before it are not finite (run.nonfinite).
  void step(const dataset::RawBatch& batch);

  /// Of the last step. Waits for it. Collective.
  TrainingMetrics metrics();

  /// Waits for all steps, and completes the state on this rank for a checkpoint or an evaluation. Collective; throws as
  /// `step`.
  void settle();

  /// True: from now on the host waits between phases and isolates exchanges, so that each can be timed, and no graph is
  /// used. For benchmarks.
  void time_phases(bool one_by_one);

  checkpoint::Registry& registry() { return registry_; }
  const Model& model() const { return model_; }
  const NormalisationOnDevice& normalisation() const { return normalisation_; }
  std::int64_t steps_done() const { return runner_.steps_done(); }
  /// After a resume: the step of the loaded state.
  void resume_at(std::int64_t step) {
    runner_.resume_at(step);
    penalties_.decoder_changed();
  }
  report::Timers& timers() { return timers_; }
  Forward& forward() { return forward_; }
  /// Active features per token and layer that the last step kept (batch_topk, topk).
  double k() const { return k_; }
  double learning_rate() const { return learning_rate_; }  ///< of the last step
  /// What this object's step takes, by purpose.
  const training::StepArena& memory() const { return arena_; }
  /// Selector::forms_products.
  bool forms_products() const { return forward_.selection().forms_products(); }
  parallel::Traffic feature_traffic() const { return runner_.exchanges()[kFeature].total(); }
  parallel::Traffic data_traffic() const { return runner_.exchanges()[kData].total(); }
  /// Of this rank and object: both axes, the selection, flags and norms.
  parallel::Exchanges exchanges() const;
  /// Whether their `seconds` are known: on GPUs only where phases are timed.
  bool traffic_is_timed() const { return world_.is_timed(); }
  /// By this rank in the last step.
  std::int64_t step_bytes_sent() const { return runner_.step_traffic().bytes_sent; }
  /// Seconds that the computation of the last step, which must be over (`settle`), waited for exchanges.
  double step_exposed_seconds() const;

 private:
  void keep_k();
  void load(const dataset::RawBatch&);
  void compute();
  void residual_and_loss();
  void auxiliary_loss();
  void order_by_feature();
  void await_gradient_rows();
  void guard();
  void clip();
  void whole_gradients();
  kernels::Matrix<float> skip_gradient_rows() const;
  void backward(const kernels::AdamStep* step);  // null: norms only
  void backward_and_update();

  void update_decoder_bias();
  void fit_biases();
  void resample(std::int64_t step);

  double error_divisor(std::int64_t n_tokens) const;
  float gradient_factor() const;
  kernels::AnyMatrix all_gradient_rows() const;  // [all tokens, L * d]
  kernels::AnyMatrix gradient_rows() const;      // [group tokens, L * d], of them
  kernels::AnyMatrix auxiliary_rows() const;     // of dead features, [all tokens, L * d]: they follow all_gradient_rows
  kernels::LateRows late_rows();
  // What this rank's backward pass works on: the features it updates, over the tokens of the whole batch.
  const kernels::SparseActivations& listed() const;       // of the selection
  const kernels::SparseActivations& activations() const;  // the same entries; 0 of those that are not active
  const kernels::FeatureHits& hits() const;               // the same by feature
  kernels::Array<std::int64_t> active_offsets() const;    // FeatureHits::offsets of active entries alone
  /// The same with all that has a gradient: the lists of dead features after those of active ones.
  struct BackwardBatch {
    const kernels::SparseActivations& activations;
    const kernels::FeatureHits& hits;
    kernels::AnyMatrix inputs, gradient_rows;
    DecoderBackward::Batch of_decoder() const { return {activations, hits, gradient_rows}; }
  };
  BackwardBatch backward_batch();
  std::int64_t n_keys() const { return model_.shape().n_layers * model_.owned().size(); }

  enum ExchangeGroup : std::size_t { kFeature, kData, kOthers };
  training::StepRunner::ExchangeGroups counted_exchanges() const;
  training::StepRunner::Settings runner_settings() const;
  void name_state();

  const Configuration configuration_;
  const Locate locate_;
  const parallel::Grid& grid_;
  kernels::Execution execution_;
  report::Timers timers_;
  training::StepArena arena_;
  Model model_;
  NormalisationOnDevice normalisation_;
  Forward forward_;
  Buffers buffers_;
  RowGather gradient_gather_;  // over the feature axis
  DataAxis data_axis_;
  Auxiliary auxiliary_;
  parallel::DeviceCommunicator world_;  // flags and norms
  DecoderBackward decoder_;
  ErrorWeights error_weights_;
  GradientNorm norm_;
  device::Event rows_complete_, whole_formed_;
  device::Upload upload_;
  training::StepRunner runner_;
  Penalties penalties_;
  JumpBackward jump_;
  InitialBias initial_bias_;
  Resampling resampling_;
  checkpoint::Registry registry_;
  bool decoder_is_ahead_ = false;  // this rank has updated what other ranks of the data axis do not have yet
  double learning_rate_ = 0;
  double k_ = 0;  // of the last step
};

/// The memory of a step on the largest rank, by purpose: what a Trainer takes. Needs no device and no ranks.
training::StepArena measure_step(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t row_bytes,
                                 kernels::Backend);

}  // namespace weft::transcoder
