// SPDX-License-Identifier: Apache-2.0
#include "transcoder/forward.hpp"

#include <algorithm>
#include <utility>

#include "kernels/convert/convert.hpp"
#include "kernels/runtime.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/encode/encode.hpp"

namespace weft::transcoder {
namespace {

constexpr std::int64_t kLargestPartial = std::int64_t{512} << 20;

device::Buffer<float> on_device(const std::vector<float>& values, const kernels::Execution& execution) {
  device::Buffer<float> buffer(static_cast<std::int64_t>(values.size()));
  device::copy(execution, buffer.data(), values.data(), buffer.bytes(), device::Direction::to_device);
  kernels::fence(execution);  // `values` may go away
  return buffer;
}

std::int64_t largest_block(std::int64_t n_layers, std::int64_t n_blocks) {
  std::int64_t largest = 0;
  for (const parallel::Range& block : layer_blocks(n_layers, n_blocks)) largest = std::max(largest, block.size());
  return largest;
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
    : total(total_tokens), group(grid.part(parallel::kDataAxis, total_tokens)) {
  for (std::int64_t g = 0; g < grid.size(parallel::kFeatureAxis); ++g)
    own_of_rank.push_back(parallel::part(group.size(), grid.size(parallel::kFeatureAxis), g));
  own = own_of_rank[static_cast<std::size_t>(grid.index(parallel::kFeatureAxis))];
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

bool exchanges_go_beside(const Configuration& configuration, const parallel::GridShape& grid) {
  return kernels::kCudaBuild && grid.size(parallel::kFeatureAxis) > 1 && configuration.parallel.blocks > 1 &&
         !configuration.parallel.manner.wait;
}

std::int64_t exchange_blocks(const Configuration& configuration, std::int64_t n_layers,
                             const parallel::GridShape& grid) {
  if (grid.size(parallel::kFeatureAxis) > 1 && !configuration.parallel.manner.together) return n_layers;
  return exchanges_go_beside(configuration, grid) ? std::min(configuration.parallel.blocks, n_layers) : 1;
}

std::int64_t decoded_at_a_time(std::int64_t micro_tokens, std::int64_t group_tokens, std::int64_t columns,
                               kernels::Scalar scalar) {
  const std::int64_t fits = std::max<std::int64_t>(1, kLargestPartial / (columns * kernels::bytes_of(scalar)));
  return std::clamp<std::int64_t>(micro_tokens > 0 ? micro_tokens : fits, 1, std::max<std::int64_t>(1, group_tokens));
}

Forward::Sizes::Sizes(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                      std::int64_t max_tokens)
    : scalar(scalar_of(configuration.precision)),
      group(parallel::largest_part(max_tokens, grid.size(parallel::kDataAxis))),
      own(parallel::largest_part(group, grid.size(parallel::kFeatureAxis))),
      n_blocks(exchange_blocks(configuration, shape.n_layers, grid)),
      columns(largest_block(shape.n_layers, n_blocks) * shape.d_model),
      chunk(decoded_at_a_time(configuration.data.micro_tokens, group, columns, scalar)),
      inputs(max_tokens * shape.width()),
      arriving(n_blocks > 1 ? group * columns : 0),
      beside(exchanges_go_beside(configuration, grid)),
      n_slots(beside ? 2 : 1),
      partial(chunk * columns),
      received(grid.size(parallel::kFeatureAxis) > 1
                   ? grid.size(parallel::kFeatureAxis) * largest_own(chunk, group, grid.size(parallel::kFeatureAxis)) *
                         columns
                   : 0) {}

std::int64_t Forward::bytes(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                            std::int64_t max_tokens, kernels::Backend backend) {
  const Sizes sizes(configuration, shape, grid, max_tokens);
  const SelectionSizes selection =
      selection_sizes(configuration.transcoder, selection_shape(configuration, shape, max_tokens), grid,
                      configuration.precision, backend);
  return sizes.bytes(sizes.inputs + sizes.arriving + sizes.n_slots * (sizes.partial + sizes.received)) +
         RowGather::bytes(sizes.own, shape.width(), sizes.n_blocks, sizes.scalar) + selection.device_bytes +
         selection.rank_0_device_bytes +
         kernels::encode_workspace(backend, selection.tile_tokens, selection.tile_features, shape.d_model, sizes.scalar,
                                   configuration.optimizer.state, sizes.scalar);
}

Forward::Forward(const Configuration& configuration, const Model& model, const NormalisationOnDevice& normalisation,
                 const parallel::Grid& grid, const kernels::Execution& execution, report::Timers& timers,
                 std::int64_t max_tokens)
    : model_(model),
      normalisation_(normalisation),
      grid_(grid),
      execution_(execution),
      timers_(timers),
      sizes_(configuration, model.shape(), grid.shape(), max_tokens),
      stream_(sizes_.beside ? std::make_unique<device::Stream>(execution) : nullptr),
      beside_(stream_ ? stream_->execution() : execution),
      exchange_(grid.axis(parallel::kFeatureAxis), beside_, sizes_.bytes(sizes_.group * model.shape().width()),
                configuration.parallel.manner.way),
      arriving_(grid.axis(parallel::kFeatureAxis), exchange_.is_direct() ? 0 : sizes_.bytes(sizes_.arriving)),
      lane_{grid.axis(parallel::kFeatureAxis),
            exchange_,
            execution_,
            beside_,
            idle_,
            layer_blocks(model.shape().n_layers, sizes_.n_blocks),
            model.shape().d_model,
            sizes_.scalar,
            arriving_.data()},
      selection_(make_selector(configuration.transcoder, selection_shape(configuration, model.shape(), max_tokens),
                               grid, execution, configuration.precision)),
      inputs_(grid.axis(parallel::kFeatureAxis), sizes_.bytes(sizes_.inputs), configuration.parallel.manner.way.kept()),
      input_gather_(lane_, "inputs", sizes_.own, model.shape().width()),
      slots_(static_cast<std::size_t>(sizes_.n_slots)),
      not_finite_(1) {
  for (Slot& slot : slots_) {
    slot.partial = {grid.axis(parallel::kFeatureAxis), sizes_.bytes(sizes_.partial), configuration.parallel.manner.way};
    slot.received = {grid.axis(parallel::kFeatureAxis), sizes_.bytes(sizes_.received),
                     configuration.parallel.manner.way};
  }
  if (!stream_) exchange_.mark(&idle_);
  selection_->mark(&idle_);
  const SelectionSizes& sizes = selection_->sizes();
  encode_workspace_ = device::Buffer<std::byte>(
      kernels::encode_workspace(execution.backend, sizes.tile_tokens, sizes.tile_features, model.shape().d_model,
                                sizes_.scalar, configuration.optimizer.state, sizes_.scalar));
}

kernels::AnyMatrix Forward::inputs() const {
  return all_inputs().rows_from(layout_->group.begin, layout_->group.size());
}

kernels::AnyMatrix Forward::all_inputs() const {
  const std::int64_t width = model_.shape().width();
  return {inputs_.data(), sizes_.scalar, layout_->total, width, width};
}

void Forward::load(const dataset::RawBatch& batch) {
  timers_.region("normalise");
  layout_.emplace(batch.n_tokens, grid_);
  device::zero(execution_, not_finite_.data(), not_finite_.bytes());
  const std::int64_t d = model_.shape().d_model;
  for (std::size_t block = 0; block < lane_.blocks.size(); ++block) {
    const std::int64_t first = lane_.blocks[block].begin * d, columns = lane_.blocks[block].size() * d;
    kernels::normalise_rows(execution_, batch.inputs.columns_from(first, columns),
                            {normalisation_.input_mean.data() + first, columns},
                            {normalisation_.input_scale.data() + first, columns},
                            input_gather_.own(*layout_, inputs(), block), not_finite_.data());
  }
}

/// Before the first product of a layer: its inputs must have come. Layers ascend in the first pass over the tiles, and
/// later passes come after it.
void Forward::bring_inputs(std::int64_t layer, const kernels::Execution& execution) {
  for (; blocks_here_ < lane_.blocks.size() && lane_.blocks[blocks_here_].begin <= layer; ++blocks_here_)
    input_gather_.wait(blocks_here_, execution);
}

void Forward::encode() {
  idle_.restart();
  const std::int64_t d = model_.shape().d_model;
  std::vector<kernels::Array<const float>> bias;
  for (const kernels::ParameterVector& vector : model_.encoder_bias()) bias.push_back(vector.weight);
  timers_.region("exchange");
  for (std::size_t block = 0; block < lane_.blocks.size(); ++block) input_gather_.send(*layout_, inputs(), block);
  blocks_here_ = 0;
  timers_.region("select");
  selection_->select(layout_->total, bias,
                     [&](const kernels::Execution& execution, const TileRequest& tile, kernels::AnyMatrix product) {
                       timers_.region("encode");
                       bring_inputs(tile.layer, execution);
                       const kernels::AnyMatrix x =
                           inputs().rows_from(tile.token_begin, tile.token_count).columns_from(tile.layer * d, d);
                       kernels::encode_tile(execution, x, model_.encoder()[static_cast<std::size_t>(tile.layer)],
                                            tile.feature_begin, product, encode_workspace_.array());
                       timers_.region("select");
                     });
}

void Forward::by_feature() {
  timers_.region("transpose");
  selection_->transpose();
}

void Forward::decode(const std::function<void(const OwnPart&)>& consume) {
  struct Decoded {
    OwnPart part;
    Slot* slot;
  };
  const std::int64_t d = model_.shape().d_model;
  const auto give = [&](const Decoded& decoded) {
    if (stream_) {
      idle_.begin(execution_);
      decoded.slot->arrived.hold_back(execution_);
      idle_.end(execution_);
    }
    if (decoded.part.count > 0) consume(decoded.part);
    decoded.slot->partial.close();
    decoded.slot->received.close();
  };

  std::optional<Decoded> under_way;
  std::size_t next_slot = 0;
  // The last layers have the longest sums: what is exchanged first has most to hide behind.
  for (std::size_t block = lane_.blocks.size(); block-- > 0;)
    for (std::int64_t begin = 0; begin < layout_->group.size(); begin += sizes_.chunk) {
      timers_.region("decode");
      Slot& slot = slots_[next_slot++ % slots_.size()];
      const parallel::Range layers = lane_.blocks[block];
      const parallel::Range chunk{begin, std::min(begin + sizes_.chunk, layout_->group.size())};
      const parallel::Range own = intersection(chunk, layout_->own);
      const std::int64_t columns = layers.size() * d;
      const kernels::AnyMatrix partial{slot.partial.open(), sizes_.scalar, chunk.size(), columns, columns};
      kernels::decode_forward(execution_, activations(), chunk.begin, chunk.size(), model_.decoder(), layers.begin,
                              partial);
      OwnPart part{own.begin - layout_->own.begin, own.size(), block, layers, partial, 1};
      if (exchange_.size() > 1) {
        timers_.region("exchange");
        // Own slices lie in rank order, so the chunk's rows already stand in the order of their destinations.
        std::vector<std::int64_t> bytes;
        for (const parallel::Range& slice : layout_->own_of_rank)
          bytes.push_back(sizes_.bytes(intersection(chunk, slice).size() * columns));
        slot.decoded.record(execution_);
        slot.decoded.hold_back(beside_);
        exchange_.send_to_owners(slot.partial.data(), bytes, slot.received.open(), "partial sums");
        slot.arrived.record(beside_);
        part.n_parts = exchange_.size();
        part.partial = {slot.received.data(), sizes_.scalar, part.n_parts * own.size(), columns, columns};
      }
      // With a second slot the next chunk is decoded before this one is used.
      if (under_way) give(*under_way);
      under_way = Decoded{part, &slot};
      if (slots_.size() == 1) give(*std::exchange(under_way, std::nullopt));
    }
  if (under_way) give(*under_way);
}

}  // namespace weft::transcoder
