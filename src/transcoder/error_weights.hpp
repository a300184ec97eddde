// SPDX-License-Identifier: Apache-2.0
//
// Weights of the squared errors by column, where the loss is not the error in normalised space (transcoder.error):
//
//   raw           1 / scale^2, constant
//   unexplained   N d / V_t: V_t is the sum of the squared deviations of the batch's targets of layer t from their
//   mean,
//                 over all ranks; formed in each step
//
// kernels/transcoder/loss/loss.hpp has the formulas.
#pragma once

#include <cstdint>

#include "parallel/device_communicator.hpp"
#include "training/step_arena.hpp"
#include "transcoder/forward.hpp"
#include "transcoder/settings.hpp"

namespace weft::transcoder {

class ErrorWeights {
 public:
  /// Empty for errors in normalised space.
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, training::StepArena&);
    kernels::Array<float> weight;    ///< [L * d]
    kernels::Array<double> moments;  ///< [ranks, 2, L * d]; of `unexplained`
  };

  /// What is passed by reference must outlive this object.
  ErrorWeights(const Configuration&, const Shape&, const NormalisationOnDevice&, const parallel::GridShape&,
               parallel::DeviceCommunicator& world, const kernels::Execution&, training::StepArena&);

  bool active() const { return form_ != ErrorForm::normalised; }
  /// For a batch of n_tokens, from the own tokens' targets, normalised [own, L * d]. Collective.
  void form(kernels::AnyMatrix targets, std::int64_t n_tokens);
  /// [L * d]
  kernels::Array<const float> weights() const { return buffers_.weight; }

  /// Largest message of the exchange over all ranks.
  static std::int64_t largest_message(const Configuration&, const Shape&, std::int64_t n_ranks);

 private:
  const ErrorForm form_;
  const std::int64_t d_model_;
  const NormalisationOnDevice& normalisation_;
  parallel::DeviceCommunicator& world_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

}  // namespace weft::transcoder
