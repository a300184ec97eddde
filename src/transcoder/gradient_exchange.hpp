// SPDX-License-Identifier: Apache-2.0
//
// The data axis: ranks that hold the same features and different tokens.
//
// Gradients are formed in buckets. A bucket holds some rows of every rank's owned slice, so all ranks work on every
// bucket; one all-to-all brings each rank the parts of its own rows, which it adds in rank order and gives to the
// optimizer. After the last bucket of a layer the new weights are gathered. Moments exist only where they are used
// (transcoder/model.hpp).
#pragma once

#include <cstdint>

#include "device/memory.hpp"
#include "kernels/sparse/sparse.hpp"
#include "parallel/device_communicator.hpp"
#include "transcoder/model.hpp"

namespace weft::transcoder {

class GradientExchange {
 public:
  /// Bytes of the buckets on one rank; 0 when the data axis has one rank.
  static std::int64_t bytes(const Shape&, parallel::GridShape);

  GradientExchange(const Model&, const parallel::Grid&, const kernels::Execution&);

  bool active() const { return ranks_.size() > 1; }

  /// What a pass over the buckets is for: the optimizer, or only the norm of the summed gradient.
  struct Purpose {
    const kernels::AdamStep* step = nullptr;  ///< on the device; null: parameters are left as they are
    kernels::Array<double> squared_norm;  ///< [L * F_local], overwritten at the owned rows, zero elsewhere; may be null
  };

  void decoder(const kernels::SparseActivations&, const kernels::FeatureHits&, kernels::AnyMatrix gradient_rows,
               const Purpose&);
  /// `bias_gradient` [L * F_local] receives the gradient of the encoder biases, summed over the data axis.
  void encoder(const kernels::SparseActivations&, const kernels::FeatureHits&, kernels::AnyMatrix inputs,
               kernels::Array<const float> preactivation_gradient, kernels::Array<float> bias_gradient, const Purpose&);

  /// In place, in rank order; for vectors of at most L * max(F_local, d).
  void sum(kernels::Array<float> vector);

  parallel::DeviceCommunicator& ranks() { return ranks_; }
  const parallel::DeviceCommunicator& ranks() const { return ranks_; }

 private:
  template <class FormGradient>
  void matrix(const kernels::ParameterRows& all, const kernels::ParameterRows& owned, std::int64_t layer,
              const Purpose&, FormGradient&& form);

  const Model& model_;
  kernels::Execution execution_;
  parallel::DeviceCommunicator ranks_;
  std::vector<parallel::Range> owned_of_rank_;  // local rows, by data rank
  device::Buffer<float> bucket_, received_, summed_;
  device::Buffer<float> vectors_;  // [data ranks, longest vector]
};

}  // namespace weft::transcoder
