// SPDX-License-Identifier: Apache-2.0
#include "transcoder/forward.hpp"

#include <algorithm>

#include "kernels/convert/convert.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/encode/encode.hpp"
#include "kernels/runtime.hpp"

namespace weft::transcoder {
namespace {

constexpr std::int64_t kLargestPartial = std::int64_t{512} << 20;

parallel::Range intersection(parallel::Range a, parallel::Range b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

device::Buffer<float> on_device(const std::vector<float>& values, const kernels::Execution& execution) {
  device::Buffer<float> buffer(static_cast<std::int64_t>(values.size()));
  device::copy(execution, buffer.data(), values.data(), buffer.bytes(), device::Direction::to_device);
  kernels::fence(execution);  // `values` may go away
  return buffer;
}

/// Largest number of own tokens that one chunk can hold: slices are contiguous, so it is bounded by both.
std::int64_t largest_own(std::int64_t chunk, std::int64_t group, std::int64_t feature_ranks) {
  return std::min(chunk, parallel::largest_part(group, feature_ranks));
}

}  // namespace

SelectionShape selection_shape(const Configuration& configuration, const Shape& shape, std::int64_t max_tokens) {
  return {shape.n_layers, shape.n_features, max_tokens, configuration.device.tile << 20, configuration.parallel.manner};
}

TokenLayout::TokenLayout(std::int64_t total_tokens, const parallel::Grid& grid)
    : total(total_tokens), group(grid.group_tokens(total_tokens)) {
  for (std::int64_t g = 0; g < grid.shape().feature; ++g)
    own_of_rank.push_back(parallel::part(group.size(), grid.shape().feature, g));
  own = own_of_rank[static_cast<std::size_t>(grid.feature_index())];
}

NormalisationOnDevice::NormalisationOnDevice(const dataset::Normalisation& normalisation,
                                             const dataset::Statistics& statistics,
                                             const kernels::Execution& execution) {
  const dataset::Affine& targets = normalisation.targets;
  input_mean = on_device(normalisation.inputs.mean, execution);
  input_scale = on_device(normalisation.inputs.scale, execution);
  target_mean = on_device(targets.mean, execution);
  target_scale = on_device(targets.scale, execution);
  const std::size_t width = targets.mean.size();
  std::vector<float> spread(width), shift(width), inverse(width), mean(width);
  for (std::size_t i = 0; i < width; ++i) {
    const double scale = static_cast<double>(targets.scale[i]), deviation = statistics.targets.standard_deviation[i];
    spread[i] = static_cast<float>(1.0 / scale);
    mean[i] = static_cast<float>(statistics.targets.mean[i]);
    shift[i] = static_cast<float>((statistics.targets.mean[i] - static_cast<double>(targets.mean[i])) * scale);
    // A dimension that never varies says nothing about the fit: it is left out of the standardised measures.
    inverse[i] = deviation > 0 ? static_cast<float>(1.0 / (scale * deviation)) : 0.0f;
  }
  target_spread = on_device(spread, execution);
  centre = on_device(shift, execution);
  standardise = on_device(inverse, execution);
  pivot = on_device(mean, execution);
}

kernels::Scalar scalar_of(Precision precision) {
  return precision == Precision::bf16 ? kernels::Scalar::bf16 : kernels::Scalar::fp32;
}

std::int64_t decoded_at_a_time(std::int64_t micro_tokens, std::int64_t group_tokens, std::int64_t width,
                               kernels::Scalar scalar) {
  const std::int64_t fits = std::max<std::int64_t>(1, kLargestPartial / (width * kernels::bytes_of(scalar)));
  return std::clamp<std::int64_t>(micro_tokens > 0 ? micro_tokens : fits, 1, std::max<std::int64_t>(1, group_tokens));
}

std::int64_t Forward::bytes(const Configuration& configuration, const Shape& shape, parallel::GridShape grid,
                            std::int64_t max_tokens, kernels::Backend backend) {
  const kernels::Scalar scalar = scalar_of(configuration.precision);
  const std::int64_t element = kernels::bytes_of(scalar), group = parallel::largest_part(max_tokens, grid.data);
  const std::int64_t chunk = decoded_at_a_time(configuration.data.micro_tokens, group, shape.width(), scalar);
  const std::int64_t received = grid.feature > 1 ? grid.feature * largest_own(chunk, group, grid.feature) : 0;
  const SelectionSizes sizes =
      selection_sizes(configuration.transcoder, selection_shape(configuration, shape, max_tokens), grid,
                      configuration.precision, backend);
  const std::int64_t packed =
      grid.feature > 1 ? RowExchange::bytes(configuration.parallel.manner, shape.d_model * element, chunk, received)
                       : 0;
  return (group + chunk + received) * shape.width() * element + packed + sizes.device_bytes +
         sizes.rank_0_device_bytes +
         kernels::encode_workspace(backend, sizes.tile_tokens, sizes.tile_features, shape.d_model, scalar,
                                   configuration.optimizer.state, scalar);
}

Forward::Forward(const Configuration& configuration, const Model& model, const NormalisationOnDevice& normalisation,
                 const parallel::Grid& grid, const kernels::Execution& execution, report::Timers& timers,
                 std::int64_t max_tokens)
    : model_(model),
      normalisation_(normalisation),
      grid_(grid),
      execution_(execution),
      timers_(timers),
      scalar_(scalar_of(configuration.precision)),
      chunk_tokens_(decoded_at_a_time(configuration.data.micro_tokens,
                                      parallel::largest_part(max_tokens, grid.shape().data), model.shape().width(),
                                      scalar_)),
      selection_(configuration.transcoder, selection_shape(configuration, model.shape(), max_tokens), grid, execution,
                 configuration.precision),
      exchange_(
          grid.feature_axis(), execution,
          parallel::largest_part(max_tokens, grid.shape().data) * model.shape().width() * kernels::bytes_of(scalar_)),
      received_rows_(grid.shape().feature > 1
                         ? grid.shape().feature * largest_own(chunk_tokens_,
                                                              parallel::largest_part(max_tokens, grid.shape().data),
                                                              grid.shape().feature)
                         : 0),
      row_exchange_(exchange_, configuration.parallel.manner, execution, model.shape().n_layers,
                    model.shape().d_model * kernels::bytes_of(scalar_), chunk_tokens_, received_rows_),
      not_finite_(1) {
  const std::int64_t row = model.shape().width() * kernels::bytes_of(scalar_);
  inputs_ = device::Buffer<std::byte>(parallel::largest_part(max_tokens, grid.shape().data) * row);
  partial_ = {chunk_tokens_ * row, configuration.parallel.manner};
  received_ = {received_rows_ * row, configuration.parallel.manner};
  const SelectionSizes& sizes = selection_.sizes();
  encode_workspace_ = device::Buffer<std::byte>(
      kernels::encode_workspace(execution.backend, sizes.tile_tokens, sizes.tile_features, model.shape().d_model,
                                scalar_, configuration.optimizer.state, scalar_));
}

kernels::AnyMatrix Forward::inputs() const {
  const std::int64_t width = model_.shape().width();
  return {inputs_.data(), scalar_, layout_->group.size(), width, width};
}

void Forward::load(const dataset::RawBatch& batch) {
  timers_.region("normalise");
  layout_.emplace(batch.n_tokens, grid_);
  device::zero(execution_, not_finite_.data(), not_finite_.bytes());
  kernels::normalise_rows(execution_, batch.inputs, normalisation_.input_mean.array(),
                          normalisation_.input_scale.array(), inputs(), not_finite_.data());
}

void Forward::encode() {
  const std::int64_t d = model_.shape().d_model;
  std::vector<kernels::Array<const float>> bias;
  for (const kernels::ParameterVector& vector : model_.encoder_bias()) bias.push_back(vector.weight);
  timers_.region("select");
  selection_.select(layout_->total, bias,
                    [&](const kernels::Execution& execution, const TileRequest& tile, kernels::AnyMatrix product) {
                      timers_.region("encode");
                      const kernels::AnyMatrix x =
                          inputs().rows_from(tile.token_begin, tile.token_count).columns_from(tile.layer * d, d);
                      kernels::encode_tile(execution, x, model_.encoder()[static_cast<std::size_t>(tile.layer)],
                                           tile.feature_begin, product, encode_workspace_.array());
                      timers_.region("select");
                    });
}

void Forward::by_feature() {
  timers_.region("transpose");
  selection_.transpose();
}

void Forward::decode(const std::function<void(const OwnPart&)>& consume) {
  const std::int64_t width = model_.shape().width();
  for (std::int64_t begin = 0; begin < layout_->group.size(); begin += chunk_tokens_) {
    timers_.region("decode");
    const parallel::Range chunk{begin, std::min(begin + chunk_tokens_, layout_->group.size())};
    const kernels::AnyMatrix partial{partial_.open(), scalar_, chunk.size(), width, width};
    kernels::decode_forward(execution_, activations(), chunk.begin, chunk.size(), model_.decoder(), partial);
    const parallel::Range own = intersection(chunk, layout_->own);
    OwnPart part{own.begin - layout_->own.begin, own.size(), partial, 1};
    if (exchange_.size() > 1) {
      timers_.region("exchange");
      // Own slices lie in rank order, so the chunk's rows already stand in the order of their destinations.
      std::vector<std::int64_t> send, receive;
      for (const parallel::Range& slice : layout_->own_of_rank) {
        send.push_back(intersection(chunk, slice).size());
        receive.push_back(own.size());
      }
      row_exchange_.all_to_all(partial_.data(), send, received_.open(), receive, "partial sums");
      part.n_parts = exchange_.size();
      part.partial = {received_.data(), scalar_, part.n_parts * own.size(), width, width};
    }
    if (own.size() > 0) consume(part);
    partial_.close();
    received_.close();
  }
}

}  // namespace weft::transcoder
