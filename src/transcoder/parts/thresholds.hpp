// SPDX-License-Identifier: Apache-2.0
//
// The thresholds of jumprelu. Their gradients need every pre-activation, not only those of active features: gradients
// of the thresholds, from all tokens in the band about them, and the encoder's gradient if inactive pre-activations
// have one: in forms that pass it below the threshold, and with a penalty on pre-activations. Forms and formulas:
// kernels/transcoder/activation/jump_relu.hpp.
//
//   z     = x~ W_enc^T + b       again, tile by tile; never stored whole
//   alpha = g W_dec^T            d loss / d a of every feature and token: the cost, one product with the whole decoder
//   sums over the tokens of factor(z, theta) alpha, and if needed dz^T x~
//
// A rank works on the features that it updates and the tokens of the whole batch; inputs and gradient rows of all
// tokens are on every rank. Tiles have fixed sizes, so sums have a fixed order.
//
// With transcoder.threshold_gradient = "listed" none of these products is formed: the selection also lists entries in
// the bands about thresholds, whose alpha the sparse backward pass forms with that of the active ones
// (kernels/transcoder/activation/threshold_band.hpp).
#pragma once

#include <cstdint>

#include "transcoder/parts/part.hpp"
#include "transcoder/parts/penalties.hpp"

namespace weft::transcoder {

class Thresholds final : public Part {
 public:
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    std::int64_t tile_tokens = 0, tile_features = 0;
    kernels::Array<std::byte> product;         ///< products of a tile, in the type of inputs
    kernels::Array<float> alpha;               ///< alpha of the same tile
    kernels::Array<float> threshold_gradient;  ///< [L * owned] gradient of the trained parameter
    kernels::Array<float> bias_gradient;       ///< [tile_features]
    kernels::Array<float> encoder_gradient;    ///< [tile_features, d]; if forms_encoder()
    kernels::Array<std::byte> gemm_workspace, sum_workspace;
    // Buffers for threshold_gradient = "listed"; they replace all of the above except threshold_gradient:
    kernels::Array<float> activation;             ///< by position
    kernels::Array<std::int64_t> active_offsets;  ///< [L * owned + 1]
  };

  static bool wanted(const Configuration& configuration, const Shape&) {
    return kernels::activation_has_thresholds(configuration.transcoder.activation);
  }

  explicit Thresholds(PartContext&);

  /// Requests the entries in the bands from the selection (lists only).
  void begin(ForwardRequest&) override;
  /// Turns the listed pre-activations into activations, 0 where an entry is not active (lists only).
  void before_backward(BackwardPass&) override;
  /// Forms the sums over all pre-activations (without lists only).
  void before_decoder(BackwardPass&) override;
  /// Forms the gradient of the thresholds and turns da into dz (lists only).
  void after_decoder(BackwardPass&) override;
  void update(BackwardPass&) override;

 private:
  /// True if this part forms the encoder's gradient in place of the sparse backward pass.
  bool forms_encoder() const { return buffers_.encoder_gradient.size > 0; }
  void form_all(const BackwardPass&);
  void form_tile(const BackwardPass&, std::int64_t layer, parallel::Range features);
  kernels::Matrix<const float> owned_thresholds() const;  // [L, owned]

  const Model& model_;
  const Clipping& clipping_;
  Penalties* const penalties_;
  Forward& forward_;
  run::Timers& timers_;
  const kernels::Execution execution_;
  const kernels::AdamStep* constants_;
  const kernels::ThresholdBand band_;
  const bool lists_;
  const Buffers buffers_;
  kernels::SparseActivations listed_;
};

}  // namespace weft::transcoder
