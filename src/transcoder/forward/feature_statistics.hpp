// SPDX-License-Identifier: Apache-2.0
//
// Mean and standard deviation of every feature's pre-activation over the tokens of a batch, for transcoder.ranking =
// "z_score".
// They follow from the covariance of the inputs (kernels/transcoder/select/ranking.hpp): a product with a [d, d] matrix
// per feature replaces a product per token.
#pragma once

#include <cstdint>

#include "model/step_arena.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

class FeatureStatistics {
 public:
  struct Buffers {
    Buffers() = default;
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    std::int64_t tile_features = 0;
    kernels::Array<float> sums;          ///< [d]
    kernels::Array<float> products;      ///< [d, d]
    kernels::Array<float> tile;          ///< [tile_features, d]
    kernels::Array<float> mean, spread;  ///< [L * F_local]
    kernels::Array<std::byte> workspace;
  };

  /// What is passed by reference must outlive this object.
  FeatureStatistics(const Model&, const kernels::Execution&, const Buffers&);

  /// Forms mean and spread from the normalised inputs x of the whole batch [N, L * d].
  void form(kernels::AnyMatrix x);
  kernels::Array<const float> mean() const { return buffers_.mean; }
  kernels::Array<const float> spread() const { return buffers_.spread; }

 private:
  const Model& model_;
  const kernels::Execution execution_;
  const Buffers& buffers_;
};

}  // namespace weft::transcoder
