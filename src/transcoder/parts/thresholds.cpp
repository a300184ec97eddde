// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/thresholds.hpp"

#include <algorithm>

#include "device/memory.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "transcoder/parts/record_clipping.hpp"

namespace weft::transcoder {

using kernels::AnyMatrix;
using kernels::Array;
using kernels::Scalar;

namespace {

/// Sizes of a tile: small enough for the cache on a host, few and large products on a GPU.
struct Tile {
  std::int64_t tokens, features;
};
constexpr Tile kHostTile{512, 512}, kGpuTile{4096, 8192};

kernels::ParameterVector part(const kernels::ParameterVector& vector, std::int64_t begin, std::int64_t count) {
  return {{vector.weight.data + begin, count},
          {vector.first_moment.data + begin, count},
          {vector.second_moment.data + begin, count}};
}

}  // namespace

Thresholds::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                             model::StepArena& arena) {
  const std::int64_t owned = largest_owned(shape, grid);
  arena.purpose("thresholds");
  threshold_gradient = arena.take<float>(shape.n_layers * owned);
  if (lists_bands(configuration.transcoder)) {
    activation = arena.take<float>(DataAxis::capacity(configuration, shape, grid));
    active_offsets = arena.take<std::int64_t>(shape.n_layers * owned + 1);
    return;
  }
  const Tile most = kernels::kCudaBuild ? kGpuTile : kHostTile;
  const Scalar scalar = scalar_of(configuration.precision);
  const kernels::StorageType storage = configuration.optimizer.state;
  tile_tokens = std::min(most.tokens, configuration.data.batch_tokens);
  tile_features = std::min(most.features, owned);
  product = arena.take<std::byte>(tile_tokens * tile_features * kernels::bytes_of(scalar));
  alpha = arena.take<float>(tile_tokens * tile_features);
  const auto product_bytes = [&](std::int64_t inner, Scalar out) {
    return kernels::encode_workspace(arena.backend(), tile_tokens, tile_features, inner, scalar, storage, out);
  };
  const Scalar weights = kernels::product_type(storage, arena.backend() == kernels::Backend::cuda);
  const std::int64_t by_target =
      shape.decoder == Decoder::tied_target
          ? kernels::gemm_workspace(scalar, weights, Scalar::fp32, tile_tokens, tile_features, shape.d_model)
          : 0;
  std::int64_t gemm_bytes = std::max(
      {product_bytes(shape.d_model, scalar), product_bytes(shape.decoder_columns(0), Scalar::fp32), by_target});
  if (passes_below_threshold(configuration.transcoder)) {
    bias_gradient = arena.take<float>(tile_features);
    encoder_gradient = arena.take<float>(tile_features * shape.d_model);
    gemm_bytes = std::max(gemm_bytes, kernels::gemm_workspace(Scalar::fp32, scalar, Scalar::fp32, tile_features,
                                                              shape.d_model, tile_tokens));
  }
  gemm_workspace = arena.take<std::byte>(gemm_bytes);
  sum_workspace = arena.take<std::byte>(kernels::jump_backward_workspace(tile_tokens, tile_features));
}

Thresholds::Thresholds(PartContext& context)
    : model_(context.model),
      clipping_(context.clipping),
      penalties_(context.penalties),
      forward_(context.forward),
      timers_(context.timers),
      execution_(context.execution),
      constants_(context.constants),
      band_{.rule = jump_rule(context.configuration.transcoder),
            .bandwidth = {static_cast<float>(context.configuration.transcoder.bandwidth), 1,
                          context.configuration.transcoder.bandwidth_end *
                              static_cast<double>(context.configuration.run.steps),
                          static_cast<float>(context.configuration.transcoder.bandwidth_initial)},
            .step = context.configuration.transcoder.bandwidth_initial > 0 ? context.constants : nullptr},
      lists_(lists_bands(context.configuration.transcoder)),
      buffers_(context.configuration, model_.shape(), context.grid.shape(), context.arena) {}

void Thresholds::begin(ForwardRequest& request) {
  if (lists_) request.band = &band_;
}

void Thresholds::before_backward(BackwardPass& pass) {
  if (!lists_) return;
  listed_ = pass.selected.activations;
  pass.selected.activations.value = {buffers_.activation.data, listed_.value.size};
  pass.active_offsets = {buffers_.active_offsets.data, model_.shape().n_layers * model_.owned().size() + 1};
  if (model_.owned().size() > 0)
    kernels::jump_activations(execution_, band_.rule, listed_, owned_thresholds(), pass.selected.activations.value);
  pass.all = pass.selected;
  pass.band = &band_;
  pass.listed = listed_;
  pass.thresholds = owned_thresholds();
}

void Thresholds::before_decoder(BackwardPass& pass) {
  if (lists_) return;
  timers_.phase("exchange");
  if (pass.late.wait) pass.late.wait();
  pass.late = {};
  timers_.phase("thresholds");
  if (model_.owned().size() > 0 && (pass.first || forms_encoder())) form_all(pass);
  pass.encoder_is_formed = forms_encoder();
  if (pass.first && penalties_ != nullptr && penalties_->needs_preactivations()) penalties_->complete();
}

/// Forms the gradients that need every pre-activation and, if forms_encoder(), the squared norms of encoder rows with
/// their biases; with a step updates these parameters.
void Thresholds::form_all(const BackwardPass& pass) {
  const std::int64_t owned = model_.owned().size(), d = model_.shape().d_model;
  const Array<double> squared_norm = clipping_.encoder_rows();
  if (forms_encoder() && squared_norm.data != nullptr) device::zero(execution_, squared_norm);
  for (std::int64_t layer = 0; layer < model_.shape().n_layers; ++layer)
    for (std::int64_t begin = 0; begin < owned; begin += buffers_.tile_features) {
      const parallel::Range features{begin, std::min(begin + buffers_.tile_features, owned)};
      form_tile(pass, layer, features);
      if (!forms_encoder()) continue;
      const std::int64_t n = features.size();
      const auto s = static_cast<std::size_t>(layer);
      const kernels::Matrix<const float> weights{buffers_.encoder_gradient.data, n, d, d};
      if (squared_norm.data != nullptr) {
        const Array<double> norms{squared_norm.data + layer * owned + begin, n};
        kernels::add_row_squares(execution_, weights, pass.step, norms);
        kernels::add_row_squares(execution_, {buffers_.bias_gradient.data, n, 1, 1}, pass.step, norms);
      }
      if (pass.step == nullptr) continue;
      kernels::adam_rows(execution_, model_.owned_encoder()[s], begin, weights, pass.step);
      kernels::adam_vector(execution_, part(model_.owned_encoder_bias()[s], begin, n), {buffers_.bias_gradient.data, n},
                           pass.step);
    }
}

/// Forms the sums of a range of features of a layer over all tokens.
void Thresholds::form_tile(const BackwardPass& pass, std::int64_t layer, parallel::Range features) {
  const kernels::SparsityPenalty no_penalty{.form = {}, .scale = 0, .coefficient = {}, .step = constants_};
  const AnyMatrix x = forward_.all_inputs(), gradient_rows = pass.gradient_rows.rows_from(0, x.rows);
  const std::int64_t d = model_.shape().d_model, n = features.size(), owned = model_.owned().size();
  const auto s = static_cast<std::size_t>(layer);
  const kernels::ParameterRows &encoder = model_.owned_encoder()[s], &decoder = model_.owned_decoder()[s];
  for (std::int64_t token = 0; token < x.rows; token += buffers_.tile_tokens) {
    const std::int64_t count = std::min(buffers_.tile_tokens, x.rows - token);
    const AnyMatrix inputs = x.rows_from(token, count).columns_from(layer * d, d);
    const AnyMatrix product{buffers_.product.data, x.type, count, n, n};
    const AnyMatrix alpha{buffers_.alpha.data, Scalar::fp32, count, n, n};
    kernels::encode_tile(execution_, inputs, encoder, features.begin, product, buffers_.gemm_workspace);
    // The product < W_dec[f], g[n, layer..] > takes the decoder's rows in place of the encoder's.
    const AnyMatrix rows = gradient_rows.rows_from(token, count);
    kernels::encode_tile(execution_, rows.columns_from(layer * d, decoder.columns), decoder, features.begin, alpha,
                         buffers_.gemm_workspace);
    if (model_.shape().decoder == Decoder::tied_target)
      for (std::int64_t target = layer + 1; target < model_.shape().n_layers; ++target)
        kernels::gemm(execution_, 1.0f, rows.columns_from(target * d, d), kernels::Form::plain,
                      kernels::product_weights(model_.owned_decoder()[static_cast<std::size_t>(target)])
                          .rows_from(features.begin, n),
                      kernels::Form::transposed, 1.0f, alpha, buffers_.gemm_workspace);
    const auto of_features = [&](Array<float> by_key) -> Array<float> {
      if (by_key.data == nullptr) return {};
      return {by_key.data + layer * owned + features.begin, n};
    };
    kernels::JumpSums sums;
    if (pass.first) sums.theta = of_features(buffers_.threshold_gradient);
    if (pass.first && penalties_ != nullptr) {
      sums.norm = of_features(penalties_->buffers().preactivation_norm_gradient);
      sums.value = of_features(penalties_->buffers().preactivation);
    }
    if (forms_encoder()) sums.bias = {buffers_.bias_gradient.data, n};
    kernels::jump_backward(
        execution_, band_.rule,
        {.product = product,
         .bias = {model_.owned_encoder_bias()[s].weight.data + features.begin, n},
         .theta = {model_.owned_thresholds()[s].weight.data + features.begin, n},
         .alpha = {buffers_.alpha.data, count, n, n},
         .replace_alpha = forms_encoder(),
         .norm = penalties_ != nullptr ? of_features(penalties_->buffers().norm) : Array<float>{},
         .bandwidth = band_.bandwidth,
         .step = band_.step,
         .sparsity = penalties_ != nullptr ? penalties_->sparsity() : no_penalty,
         .preactivation = penalties_ != nullptr ? penalties_->preactivation() : kernels::PreactivationPenalty{}},
        token > 0, sums, buffers_.sum_workspace);
    if (forms_encoder())
      kernels::gemm(execution_, 1.0f, alpha, kernels::Form::transposed, inputs, kernels::Form::plain,
                    token > 0 ? 1.0f : 0.0f, {buffers_.encoder_gradient.data, Scalar::fp32, n, d, d},
                    buffers_.gemm_workspace);
  }
}

kernels::Matrix<const float> Thresholds::owned_thresholds() const {
  const AnyMatrix all = model_.thresholds();
  return {static_cast<const float*>(all.data) + model_.owned().begin, all.rows, model_.owned().size(), all.stride};
}

void Thresholds::after_decoder(BackwardPass& pass) {
  if (!lists_ || model_.owned().size() == 0) return;
  timers_.phase("thresholds");
  const std::int64_t n_keys = model_.shape().n_layers * model_.owned().size();
  kernels::threshold_band_backward(execution_, band_, listed_, pass.selected.hits, owned_thresholds(), pass.gradient,
                                   {{buffers_.threshold_gradient.data, n_keys}, pass.active_offsets});
}

void Thresholds::update(BackwardPass& pass) {
  const std::int64_t owned = model_.owned().size();
  if (owned == 0) return;
  timers_.phase("thresholds");
  if (pass.records != nullptr)
    for (std::int64_t s = 0; s < model_.shape().n_layers; ++s)
      pass.records->add_noise(RecordClipping::kThreshold, s, {buffers_.threshold_gradient.data + s * owned, owned});
  if (const Array<double> norms = clipping_.encoder_rows(); norms.data != nullptr)
    kernels::add_row_squares(execution_, {buffers_.threshold_gradient.data, norms.size, 1, 1}, pass.step, norms);
  if (pass.step == nullptr) return;
  for (std::size_t s = 0; s < model_.owned_thresholds().size(); ++s)
    kernels::update_thresholds(execution_, band_.rule, model_.owned_thresholds()[s],
                               {buffers_.threshold_gradient.data + static_cast<std::int64_t>(s) * owned, owned},
                               pass.step);
}

}  // namespace weft::transcoder
