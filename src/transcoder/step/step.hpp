// SPDX-License-Identifier: Apache-2.0
//
// One training step of a transcoder: step.cpp has its formulas, in order. Optional work is a Part (parts/part.hpp),
// work that differs between decoders is a SparseDecoder (decoder/decoder.hpp), exchanges between ranks are in axes/ and
// forward/.
//
// A step launches the same work each time: on a GPU it is captured once and replayed (model/step_runner.hpp). Data
// for other ranks are sent as early as possible and awaited as late as possible.
#pragma once

#include <memory>
#include <vector>

#include "model/step_runner.hpp"
#include "transcoder/parts/part.hpp"
#include "transcoder/parts/record_clipping.hpp"
#include "transcoder/step/decoder_bias.hpp"
#include "transcoder/step/reconstruction_loss.hpp"

namespace weft::transcoder {

class Step {
 public:
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, SparseDecoder&, model::StepArena&);
    Loss::Buffers loss;
    DecoderBiasUpdate::Buffers bias;
    Clipping::Buffers clipping;
    RecordClipping::Buffers records;            ///< of a private step
    kernels::Array<float> activation_gradient;  ///< by position in the lists of the backward pass
    kernels::Array<std::byte> encoder_workspace;
  };
  /// Bytes of the largest message that all ranks exchange.
  static std::int64_t largest_message(const Configuration&, const Shape&, std::int64_t n_ranks);

  /// world: communicator of all ranks, for messages of at most `largest_message`. What is passed by reference must
  /// outlive this object. Collective.
  Step(const Configuration&, const Model&, const NormalisationOnDevice&, Forward&, const parallel::Grid&,
       const kernels::Execution&, run::Timers&, parallel::DeviceCommunicator& world, model::StepRunner&,
       model::StepArena&);

  /// Loads the targets of the own tokens of a batch from memory that the kernels can read; Forward::load loads the
  /// inputs.
  void load(kernels::AnyMatrix targets) { loss_.load(targets); }
  /// Calls the parts before and after `run`, outside of the captured graph. Steps count from 1. Collective.
  void begin(std::int64_t step);
  void end(std::int64_t step);
  /// Runs the step from the normalised activations of a batch to the updated parameters. Collective.
  void run();

  /// Must be called after parameters were changed other than by a step.
  void parameters_changed() { ++changes_; }
  /// Sends the decoder of the last update to all ranks, which otherwise happens in the next step. Collective.
  void complete_decoder();
  void observe(const parallel::ExchangeObserver*);
  /// Waits until no work is in flight, before a phase is timed.
  void fence();
  /// Sets the metrics of parts: sums over the ranks. Waits for the device. Collective.
  void fill(TrainingMetrics&, const parallel::Communicator& ranks) const;

  const Loss& loss() const { return loss_; }
  const Clipping& clipping() const { return clipping_; }
  /// Clipping and noise of private steps; null: the run is not private.
  RecordClipping* records() { return records_.get(); }
  DataAxis& data_axis() { return data_axis_; }
  /// The selections of a step; the first one is that of the forward pass.
  const std::vector<Selector*>& selectors() const { return selectors_; }

 private:
  BackwardPass whole_batch();
  void backward(BackwardPass&);
  void encoder_backward(BackwardPass&);
  void check_finite();
  void count(const BackwardPass&);

  const Model& model_;
  Forward& forward_;
  kernels::Execution execution_;
  run::Timers& timers_;
  parallel::DeviceCommunicator& world_;
  model::StepRunner& runner_;
  const Buffers buffers_;
  DataAxis data_axis_;
  GradientRows gradient_rows_;
  Loss loss_;
  DecoderBiasUpdate bias_;
  Clipping clipping_;
  std::unique_ptr<RecordClipping> records_;
  device::Event rows_complete_, whole_formed_;
  std::int64_t changes_ = 0;
  std::vector<Selector*> selectors_;
  std::vector<PartContext::Value> values_;
  std::vector<std::unique_ptr<Part>> parts_;
  bool decoder_is_ahead_ = false;  // other ranks of the data axis have not received this rank's last update
};

}  // namespace weft::transcoder
