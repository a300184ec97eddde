// SPDX-License-Identifier: Apache-2.0
//
// The decoder bias: its gradient is the sum of the gradient rows, which every rank forms over the whole batch. With a
// bias per pair of layers (transcoder.decoder_bias = "pair") only the sums per target matter: one bias per target is
// trained, whose gradient and update stand for those of all pairs
// (kernels/transcoder/decode/pair_bias.hpp).
#pragma once

#include "model/step_arena.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

class DecoderBiasUpdate {
 public:
  struct Buffers {
    Buffers(const Configuration&, const Shape&, model::StepArena&);
    kernels::Array<float> gradient;  ///< [L * d]
    kernels::Array<float> pair;      ///< [L * d]; only with a bias per pair
  };

  /// What is passed by reference must outlive this object.
  DecoderBiasUpdate(const Model&, const kernels::Execution&, const Buffers&);

  /// Forms the gradient on the stream of `communication`. gradient_rows: [tokens, L * d].
  void form(const kernels::Execution& communication, kernels::AnyMatrix gradient_rows);
  /// Row [1, L * d] whose norm is that of the gradient; valid after `form_norm`.
  kernels::Matrix<const float> norm_row() const;
  void form_norm();
  kernels::Array<float> gradient() const { return buffers_.gradient; }
  void update(const kernels::AdamStep*);

 private:
  const Model& model_;
  const kernels::Execution execution_;
  const Buffers& buffers_;
};

}  // namespace weft::transcoder
