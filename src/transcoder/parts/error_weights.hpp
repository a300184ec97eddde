// SPDX-License-Identifier: Apache-2.0
//
// Weights of the squared errors by column, where the loss is not the error in normalised space (transcoder.error):
//
//   raw           1 / scale^2, constant
//   unexplained   N d / V_t: V_t is the sum, over all ranks, of the squared deviations of the batch's targets of
//                 layer t from their mean; formed in each step
//
// kernels/transcoder/loss/loss.hpp has the formulas.
#pragma once

#include <cstdint>

#include "transcoder/parts/part.hpp"

namespace weft::transcoder {

class ErrorWeights final : public Part {
 public:
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    kernels::Array<float> weight;    ///< [L * d]
    kernels::Array<double> moments;  ///< [ranks, 2, L * d] sums for the variance of `unexplained`
  };

  static bool wanted(const Configuration& configuration, const Shape&) {
    return configuration.transcoder.error != ErrorForm::normalised;
  }
  /// Bytes of the largest message between n_ranks ranks.
  static std::int64_t largest_message(const Configuration&, const Shape&, std::int64_t n_ranks);

  explicit ErrorWeights(PartContext&);

  void begin(ForwardRequest&) override;

 private:
  const ErrorForm form_;
  const Forward& forward_;
  const NormalisationOnDevice& normalisation_;
  const kernels::Array<float> targets_;
  parallel::DeviceCommunicator& world_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

}  // namespace weft::transcoder
