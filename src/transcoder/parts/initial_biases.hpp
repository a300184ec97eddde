// SPDX-License-Identifier: Apache-2.0
//
// Encoder biases from the first batch (transcoder.encoder_bias_initial = "data"): every feature is active on
// floor(r N) of its N tokens, r = initially_active / features, at most 1/2
// (kernels/transcoder/encode/quantile_bias.hpp). Every rank sets the biases of all features that it holds from all
// tokens, so the ranks of the data axis have the same biases.
#pragma once

#include <cstdint>

#include "transcoder/parts/part.hpp"

namespace weft::transcoder {

class InitialBias final : public Part {
 public:
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    std::int64_t tile_features = 0;
    kernels::Array<float> product;  ///< [batch, tile_features]
    kernels::Array<std::byte> workspace;
  };

  static bool wanted(const Configuration& configuration, const Shape&) {
    return configuration.transcoder.encoder_bias_initial == EncoderBiasInitial::data;
  }

  explicit InitialBias(PartContext&);

  /// Overwrites all encoder biases before the first step. Collective.
  void before_step(std::int64_t step) override;

 private:
  /// Sets the biases from the normalised inputs x of the whole batch [N, L * d].
  void fit(kernels::AnyMatrix x);

  const ModelSettings settings_;
  const Model& model_;
  Forward& forward_;
  DataAxis& data_axis_;
  run::Timers& timers_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

}  // namespace weft::transcoder
