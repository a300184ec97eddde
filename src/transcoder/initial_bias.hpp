// SPDX-License-Identifier: Apache-2.0
//
// Encoder biases from the first batch (transcoder.encoder_bias_initial = "data"): every feature is active on
// floor(r N) of its N tokens, r = initially_active / features, at most 1/2
// (kernels/transcoder/encode/initial_bias.hpp). Every rank fits all features that it holds from all tokens, so the
// ranks of the data axis have the same biases.
#pragma once

#include <cstdint>

#include "training/step_arena.hpp"
#include "transcoder/model.hpp"
#include "transcoder/settings.hpp"

namespace weft::transcoder {

class InitialBias {
 public:
  /// Empty unless wanted.
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, training::StepArena&);
    std::int64_t tile_features = 0;
    kernels::Array<float> product;  ///< [batch, tile_features]
    kernels::Array<std::byte> workspace;
  };

  /// What is passed by reference must outlive this object.
  InitialBias(const Configuration&, const Model&, const parallel::GridShape&, const kernels::Execution&,
              training::StepArena&);

  bool active() const { return settings_.encoder_bias_initial == EncoderBiasInitial::data; }
  /// x: normalised inputs of the whole batch [N, L * d]. Overwrites all encoder biases.
  void fit(kernels::AnyMatrix x);

 private:
  const ModelSettings settings_;
  const Model& model_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

}  // namespace weft::transcoder
