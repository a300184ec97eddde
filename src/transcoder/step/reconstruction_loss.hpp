// SPDX-License-Identifier: Apache-2.0
//
// The error of the reconstruction, for the own tokens of this rank (kernels/transcoder/loss/loss.hpp):
//
//   r = y^ + b - y,   loss = sum over layers of the mean of w r^2,   g = 2 w r / divisor
//
// and the sums over tokens from which the metrics of a step are formed.
#pragma once

#include "model/step_arena.hpp"
#include "run/timers.hpp"
#include "transcoder/forward/forward.hpp"
#include "transcoder/forward/gradient_rows.hpp"

namespace weft::transcoder {

class Loss {
 public:
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    kernels::Array<float> targets;     ///< [largest own slice, L * d] normalised
    kernels::Array<double> part_sums;  ///< [3 * L] sums over a part of the own tokens
    kernels::Array<double> step_sums;  ///< [4 * L], MetricSums of the last step
    kernels::Array<std::byte> workspace;
  };

  /// What is passed by reference must outlive this object.
  Loss(const Model&, const NormalisationOnDevice&, const Forward&, const GradientRows&, const kernels::Execution&,
       run::Timers&, const Buffers&);

  /// Loads the targets of a batch and normalises them; values that are not finite are flagged.
  void load(kernels::AnyMatrix targets);
  void begin();
  /// Adds a part of the own tokens and writes its gradient rows. error_weights: [L * d]; empty: all 1.
  void add(const Forward::OwnPart&, kernels::Array<const float> error_weights);
  void finish();

  /// Sums [4, L]: loss, squared standardised error, squared standardised target, active entries (added by the step).
  kernels::Array<double> sums() const { return buffers_.step_sums; }

 private:
  const Model& model_;
  const NormalisationOnDevice& normalisation_;
  const Forward& forward_;
  const GradientRows& gradient_rows_;
  const kernels::Execution execution_;
  run::Timers& timers_;
  const Buffers& buffers_;
  bool at_once_ = false;  // true if the last part had all own tokens: each layer has one sum
};

}  // namespace weft::transcoder
