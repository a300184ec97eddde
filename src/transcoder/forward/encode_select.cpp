// SPDX-License-Identifier: Apache-2.0
//
// Encode, select, activate: z = x~ W_enc^T + b, tile by tile and never stored whole; the entries that the activation
// keeps; their values a = f(z).
#include <utility>

#include "kernels/kokkos_runtime.hpp"
#include "kernels/transcoder/activation/jump_relu.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "kernels/transcoder/select/ranking.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"
#include "transcoder/forward/forward.hpp"

namespace weft::transcoder {

/// Makes later work on `execution` wait until the inputs of a layer have arrived. Called before each product: layers
/// ascend in the first pass over the tiles; in later passes all inputs have arrived.
void Forward::await_inputs(std::int64_t layer, const kernels::Execution& execution) {
  for (; blocks_here_ < axis_.blocks.size() && axis_.blocks[blocks_here_].begin <= layer; ++blocks_here_)
    input_gather_.wait(blocks_here_, execution);
}

/// True if this rank's inputs of the first block are encoded while those of other ranks are in transit: the inputs are
/// gathered in place.
bool Forward::begins_with_own_inputs() const {
  return axis_.blocks.size() > 1 && axis_.staging == nullptr && layout_->own.size() > 0;
}

/// Returns the parts to encode, in the order in which their inputs arrive: block by block of layers.
std::vector<kernels::EncoderOperands::Part> Forward::parts_to_encode() const {
  std::vector<kernels::EncoderOperands::Part> parts;
  const parallel::Range own = layout_->own;
  for (const parallel::Range& layers : axis_.blocks) {
    const auto add = [&](std::int64_t begin, std::int64_t end) {
      if (begin < end) parts.push_back({layers.begin, layers.end, begin, end - begin});
    };
    if (parts.empty() && begins_with_own_inputs()) {
      add(own.begin, own.end);
      add(0, own.begin);
      add(own.end, layout_->group.size());
    } else {
      add(0, layout_->group.size());
    }
  }
  return parts;
}

/// Selects the entries that exceed the present thresholds; with a ThresholdBand also the entries in the band.
void Forward::select_above_bounds(std::span<const kernels::Array<const float>> bias,
                                  const kernels::ThresholdBand* band) {
  const kernels::AnyMatrix thresholds = model_.thresholds();
  const std::int64_t n = thresholds.columns;
  const kernels::Array<const float> theta{static_cast<const float*>(thresholds.data), thresholds.rows * n};
  kernels::jump_bounds(execution_, jump_rule(settings_), theta, buffers_.bounds);
  if (band != nullptr) kernels::threshold_band_bounds(execution_, *band, theta, buffers_.band_bounds);
  const float* const bounds = band != nullptr ? buffers_.band_bounds.data : buffers_.bounds.data;
  std::vector<kernels::Array<const float>> of_layer;
  for (std::int64_t s = 0; s < thresholds.rows; ++s) of_layer.push_back({bounds + s * n, n});
  select(bias, of_layer);
}

/// Forms the activations a = f(z) from the pre-activations that the selection has listed. a = z, so that they are the
/// same list, but for entries of a band about the threshold that are not active: they are left out.
void Forward::activate(const kernels::ThresholdBand* band) {
  const kernels::SparseActivations& list = listed();
  if (band == nullptr) {
    activations_ = list;
    return;
  }
  activations_ = {list.n_tokens,       list.n_layers,
                  list.n_features,     {buffers_.active_offsets.data, list.n_tokens + 1},
                  buffers_.active_key, buffers_.active_value};
  kernels::restrict_features(execution_, {&list, 1}, 0, activations_, buffers_.bounds);
}

void Forward::gather_inputs() {
  for (std::size_t block = 0; block < axis_.blocks.size(); ++block) input_gather_.send(*layout_, inputs(), block);
  input_gather_.wait(axis_.blocks.size() - 1, execution_);
}

void Forward::encode(const kernels::ThresholdBand* band, Selector* follower) {
  idle_.restart();
  follower_ = follower;
  std::vector<kernels::Array<const float>> bias;
  for (const kernels::ParameterVector& vector : model_.encoder_bias()) bias.push_back(vector.weight);
  timers_.phase("exchange");
  for (std::size_t block = 0; block < axis_.blocks.size(); ++block) input_gather_.send(*layout_, inputs(), block);
  blocks_here_ = 0;
  // A model that is converted already has thresholds while its trained activation still selects.
  if (kernels::activation_has_thresholds(settings_.activation)) {
    select_above_bounds(bias, band);
  } else if (ranks_by_decoder()) {
    encode_by_norm();
  } else if (settings_.ranking == Ranking::z_score) {
    encode_by_z_score();
  } else {
    select(bias, {});
  }
  activate(band);
}

/// Selects by the products of pre-activations and norms of decoder rows.
void Forward::encode_by_norm() {
  const std::int64_t n = model_.n_local();
  const kernels::Array<const float> norms{buffers_.norms.data, model_.shape().n_layers * n};
  if (n > 0) {
    kernels::decoder_norms(execution_, model_.decoder(), {buffers_.norms.data, norms.size});
    buffers_.decoder->to_feature_norms({buffers_.norms.data, norms.size});
  }
  const std::vector<kernels::Array<const float>> no_bias(model_.encoder().size(), {buffers_.no_bias.data, n});
  timers_.phase("select");
  selection_->select(
      layout_->total, no_bias,
      [&](const kernels::Execution& execution, const kernels::TileRange& tile, kernels::AnyMatrix product) {
        encode_tile(execution, tile, product);
        const kernels::Array<float> bias = model_.encoder_bias()[static_cast<std::size_t>(tile.layer)].weight;
        kernels::rank_tile(execution, product, {bias.data + tile.feature_begin, tile.feature_count},
                           {norms.data + tile.layer * n + tile.feature_begin, tile.feature_count});
      });
  kernels::unrank(execution_, listed(), norms);
}

/// Selects by pre-activations less their mean over the batch, in standard deviations.
void Forward::encode_by_z_score() {
  const std::int64_t n = model_.n_local(), n_layers = model_.shape().n_layers;
  timers_.phase("statistics");
  await_inputs(n_layers - 1, execution_);
  statistics_.form(inputs());
  const std::vector<kernels::Array<const float>> no_bias(model_.encoder().size(), {buffers_.no_bias.data, n});
  timers_.phase("select");
  selection_->select(
      layout_->total, no_bias,
      [&](const kernels::Execution& execution, const kernels::TileRange& tile, kernels::AnyMatrix product) {
        encode_tile(execution, tile, product);
        const kernels::Array<float> bias = model_.encoder_bias()[static_cast<std::size_t>(tile.layer)].weight;
        const auto of_tile = [&](kernels::Array<const float> all) -> kernels::Array<const float> {
          return {all.data + tile.layer * n + tile.feature_begin, tile.feature_count};
        };
        kernels::standardise_tile(execution, product, {bias.data + tile.feature_begin, tile.feature_count},
                                  of_tile(statistics_.mean()), of_tile(statistics_.spread()));
      });
  kernels::unstandardise(execution_, listed(), statistics_.mean(), statistics_.spread());
}

void Forward::encode_tile(const kernels::Execution& execution, const kernels::TileRange& tile,
                          kernels::AnyMatrix product) {
  const std::int64_t d = model_.shape().d_model;
  timers_.phase("encode");
  await_inputs(tile.layer, execution);
  const kernels::AnyMatrix x = inputs().rows_from(tile.token_begin, tile.token_count).columns_from(tile.layer * d, d);
  kernels::encode_tile(execution, x, model_.encoder()[static_cast<std::size_t>(tile.layer)], tile.feature_begin,
                       product, buffers_.encode_workspace);
  if (follower_ != nullptr) {
    timers_.phase("dead features");
    follower_->take(execution, tile, product);
  }
  timers_.phase("select");
}

void Forward::select(std::span<const kernels::Array<const float>> bias,
                     std::span<const kernels::Array<const float>> bounds) {
  timers_.phase("select");
  std::vector<kernels::AnyMatrix> weight;
  for (const kernels::ParameterRows& encoder : model_.encoder()) weight.push_back(kernels::product_weights(encoder));
  const std::vector<kernels::EncoderOperands::Part> parts = parts_to_encode();
  const kernels::EncoderOperands operands{
      .x = inputs(),
      .weight = weight,
      .arrive = [&](const kernels::Execution& execution, std::size_t i) -> kernels::EncoderOperands::Part {
        timers_.phase(i < parts.size() ? "encode" : "select");
        if (i == parts.size()) return {};
        if (i > 0 || !begins_with_own_inputs()) await_inputs(parts[i].layer_begin, execution);
        return parts[i];
      },
      .arrive_layer =
          [&](const kernels::Execution& execution, std::int64_t layer) {
            const bool products = layer < std::ssize(weight);
            timers_.phase(products ? "encode" : "select");
            if (products) await_inputs(layer, execution);
          }};
  selection_->select(
      layout_->total, bias,
      [&](const kernels::Execution& execution, const kernels::TileRange& tile, kernels::AnyMatrix product) {
        encode_tile(execution, tile, product);
      },
      bounds, follower_ != nullptr ? nullptr : &operands);
}

}  // namespace weft::transcoder
