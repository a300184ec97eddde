// SPDX-License-Identifier: Apache-2.0
//
// The part of jumprelu's backward pass that needs every pre-activation, not only those of active features: gradients of
// the thresholds, from all tokens within their window, and the encoder's if inactive pre-activations have a gradient:
// in forms that pass it below the threshold, and with a penalty on pre-activations. Forms and formulas:
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
// the windows of thresholds, whose alpha the sparse backward pass gives with that of the active ones
// (kernels/transcoder/activation/jump_window.hpp). `activate`, then the decoder's backward pass, then `form_listed`.
#pragma once

#include <cstdint>

#include "kernels/transcoder/activation/jump_window.hpp"
#include "training/step_arena.hpp"
#include "transcoder/model.hpp"
#include "transcoder/penalties.hpp"
#include "transcoder/settings.hpp"

namespace weft::transcoder {

class JumpBackward {
 public:
  /// Empty without thresholds.
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, training::StepArena&);
    std::int64_t tile_tokens = 0, tile_features = 0;
    kernels::Array<std::byte> product;         ///< a tile, of the type of inputs
    kernels::Array<float> alpha;               ///< the same tile
    kernels::Array<float> threshold_gradient;  ///< [L * owned], of the trained parameter
    kernels::Array<float> bias_gradient;       ///< [tile_features]
    kernels::Array<float> encoder_gradient;    ///< [tile_features, d]; if forms_encoder()
    kernels::Array<std::byte> gemm_workspace, sum_workspace;
    // Of lists, in place of all but threshold_gradient:
    kernels::Array<float> activation;             ///< by position
    kernels::Array<std::int64_t> active_offsets;  ///< [L * owned + 1]
  };

  /// `step` is read by kernels.
  JumpBackward(const Configuration&, const Model&, const parallel::GridShape&, const kernels::Execution&,
               const kernels::AdamStep* step, training::StepArena&);

  /// True if the model has thresholds. If not, nothing else may be called.
  bool active() const { return model_.shape().threshold.has_value(); }
  /// True if `run` also forms the encoder's gradient, in place of the sparse backward pass.
  bool forms_encoder() const { return buffers_.encoder_gradient.size > 0; }
  /// What the selection shall list besides active entries; null: nothing, and the gradient is formed by `run`.
  const kernels::JumpWindow* window() const { return lists_ ? &window_ : nullptr; }

  /// Before any parameter is updated, after Penalties::form. x: [all tokens of the batch, L * d]; gradient_rows:
  /// DecoderBackward::rows of the same tokens.
  /// with_thresholds: forms the gradient of the thresholds, and the penalties' sums over pre-activations. If
  /// forms_encoder(): the squared norms of encoder rows with their biases ([L * owned], if not empty), and with a step
  /// their update.
  void run(kernels::AnyMatrix x, kernels::AnyMatrix gradient_rows, const Penalties&, bool with_thresholds,
           const kernels::AdamStep* step, kernels::Array<double> squared_norm);
  /// With a window. Takes the lists of the owned features over all tokens, with pre-activations as values.
  void activate(const kernels::SparseActivations& listed);
  /// The same with activations as values: 0 where an entry is not active.
  const kernels::SparseActivations& activations() const { return activations_; }
  /// FeatureHits::offsets of the active entries alone, after `form_listed`.
  kernels::Array<std::int64_t> active_offsets() const;
  /// Forms the gradient of the thresholds. hits: of the lists; activation_gradient, by position: that of every entry,
  /// with penalties; becomes the gradient of pre-activations.
  void form_listed(const kernels::FeatureHits& hits, kernels::Array<float> activation_gradient);
  /// Adds the squares of the thresholds' gradient, of the clipped one with a step: [L * owned].
  void add_norms(const kernels::AdamStep* step, kernels::Array<double> squared_norm);
  void update(const kernels::AdamStep* step);

 private:
  void run_tile(kernels::AnyMatrix x, kernels::AnyMatrix gradient_rows, const Penalties&, std::int64_t layer,
                parallel::Range features, bool with_thresholds);

  kernels::Matrix<const float> owned_thresholds() const;  // [L, owned]

  const Model& model_;
  const kernels::Execution execution_;
  const kernels::JumpWindow window_;
  const bool lists_;
  const Buffers buffers_;
  kernels::SparseActivations listed_, activations_;
};

}  // namespace weft::transcoder
