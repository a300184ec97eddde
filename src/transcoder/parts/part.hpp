// SPDX-License-Identifier: Apache-2.0
//
// Optional terms and techniques of a training step. Each is a class in a file of its own, in the list of parts
// (parts/list.cpp), and present only if the input requests it. step/step.cpp calls all parts that are present at the
// named places of a step; no other code depends on them.
//
//   before_step       initial biases, norms for penalties         not part of what a GPU captures
//   begin             dead features, thresholds, error weights    before the encoder
//   on_loss           dead features                               the gradient rows of the own tokens are known
//   before_backward   thresholds, skip connection, dead features  lists and gradient rows of the whole batch are known
//   before_decoder    penalties, thresholds                       before da and dW_dec
//   after_decoder     penalties, thresholds                       da is known
//   update            thresholds, skip connection                 after the encoder's update
//   after_step        resampling                                  not part of what a GPU captures
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/transcoder/activation/threshold_band.hpp"
#include "transcoder/axes/data_axis.hpp"
#include "transcoder/decoder/decoder.hpp"
#include "transcoder/forward/forward.hpp"
#include "transcoder/forward/gradient_rows.hpp"
#include "transcoder/parts/norm_clipping.hpp"
#include "transcoder/parts/training_metrics.hpp"

namespace weft::transcoder {

/// Largest residual, in deviations of the data, that counts as finite: the square of a larger one would soon overflow
/// fp32. A sum of squares above its square contains such a residual or is equally unusable.
constexpr double kLargestResidual = 1e18;

class RecordClipping;

/// Requests of parts to the forward pass.
struct ForwardRequest {
  const kernels::ThresholdBand* band = nullptr;    ///< the selection also lists entries in the bands about thresholds
  Selector* follower = nullptr;                    ///< a selector that also takes the products of all tiles
  kernels::Array<const float> error_weights = {};  ///< [L * d] weights of the squared errors; empty: all 1
};

/// Operands of this rank's backward pass: the features that it updates, over the tokens of the whole batch.
struct BackwardPass {
  /// Constants of the update. Null: squared norms of the gradients only, no parameter changes.
  const kernels::AdamStep* step = nullptr;
  /// False in the second of two passes over the same batch: results that depend on gradients alone exist already.
  bool first = true;

  Lists selected;                    ///< selected entries; the value is 0 where thresholds list more than is active
  Lists all;                         ///< all entries with a gradient: those selected, then those of dead features
  kernels::AnyMatrix inputs;         ///< inputs of the tokens of `all` [n, L * d]
  kernels::AnyMatrix gradient_rows;  ///< gradient rows of the same tokens [n, L * d], after SparseDecoder::prepare
                                     ///< in the form that the decoder needs
  kernels::LateRows late;            ///< gradient rows that have not arrived
  kernels::Array<std::int64_t> active_offsets;  ///< FeatureHits::offsets of the active entries alone
  /// Where the entries of bands about thresholds are listed too: the bands, the lists of pre-activations, and the
  /// thresholds of the owned features [L, owned].
  const kernels::ThresholdBand* band = nullptr;
  kernels::SparseActivations listed = {};
  kernels::Matrix<const float> thresholds = {};

  kernels::Array<float> gradient;                ///< da, then dz, by position in `all`
  kernels::Array<const float> row_factors = {};  ///< factors of decoder rows in their gradient; empty: none
  kernels::Array<float> new_norms = {};          ///< receives the norms of updated decoder rows; empty: not formed
  bool encoder_is_formed = false;                ///< a part has formed the encoder's gradient
  const RecordClipping* records = nullptr;       ///< clipping and noise of a private step; null: none
  std::vector<kernels::Matrix<const float>> whole = {};  ///< gradients that are complete on every rank
  /// Execution that forms `whole`, overlapping with the backward pass.
  const kernels::Execution& communication;
};

class Part {
 public:
  virtual ~Part() = default;
  /// Called before a step, when the inputs of the batch are loaded. Steps count from 1.
  virtual void before_step(std::int64_t) {}
  virtual void begin(ForwardRequest&) {}
  virtual void on_loss() {}
  virtual void before_backward(BackwardPass&) {}
  virtual void before_decoder(BackwardPass&) {}
  virtual void after_decoder(BackwardPass&) {}
  virtual void update(BackwardPass&) {}
  /// Called after a step. Gradient rows and inputs are still those of the step.
  virtual void after_step(std::int64_t) {}
};

class Penalties;

/// Arguments of the constructors of parts. All references outlive the parts.
struct PartContext {
  const Configuration& configuration;
  const Model& model;
  const NormalisationOnDevice& normalisation;
  const parallel::Grid& grid;
  const kernels::Execution& execution;
  run::Timers& timers;
  model::StepArena& arena;
  Forward& forward;
  DataAxis& data_axis;
  GradientRows& gradient_rows;
  const Clipping& clipping;
  parallel::DeviceCommunicator& world;  ///< communicator of all ranks
  const kernels::AdamStep* constants;   ///< constants of the present step; read by kernels
  /// Normalised targets [largest own slice, L * d].
  kernels::Array<float> targets;
  /// Number of changes of parameters other than by a step.
  std::int64_t& changes;

  /// Parts add their selectors, whose exchanges are observed and counted,
  std::vector<Selector*>& selectors;
  /// and their values in the metrics of a step. A value is that of this rank; reading it waits for the device.
  struct Value {
    double TrainingMetrics::*metric;
    std::function<double()> of_rank;
  };
  std::vector<Value>& values;
  /// The part `Penalties` of the step, after it is made: thresholds form some of its sums. Null: none.
  Penalties* penalties = nullptr;
};

}  // namespace weft::transcoder
