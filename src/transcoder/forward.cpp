// SPDX-License-Identifier: Apache-2.0
#include "transcoder/forward.hpp"

#include <algorithm>
#include <utility>

#include "kernels/convert/convert.hpp"
#include "kernels/runtime.hpp"
#include "kernels/transcoder/activation/jump_relu.hpp"
#include "kernels/transcoder/encode/encode.hpp"
#include "kernels/transcoder/select/ranking.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"
#include "parallel/failure.hpp"
#include "transcoder/benchmark/exchange_observers.hpp"
#include "transcoder/skip.hpp"

namespace weft::transcoder {
namespace {

constexpr std::int64_t kLargestPartial = std::int64_t{512} << 20;

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
  ExchangeSettings exchange = configuration.parallel.exchange;
  exchange.strategy = exchange_strategy(exchange);
  return {shape.n_layers, shape.n_features, max_tokens, configuration.tile << 20, exchange};
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
    // A constant dimension carries no information about the fit: the standardised measures exclude it.
    inverse[i] = deviation > 0 ? static_cast<float>(1.0 / (scale * deviation)) : 0.0f;
  }
  target_spread = on_device(spread, execution);
  centre = on_device(shift, execution);
  standardise = on_device(inverse, execution);
  pivot = on_device(mean, execution);
}

std::int64_t decoded_at_a_time(std::int64_t micro_tokens, std::int64_t group_tokens, std::int64_t columns,
                               kernels::Scalar scalar) {
  const std::int64_t fits = std::max<std::int64_t>(1, kLargestPartial / (columns * kernels::bytes_of(scalar)));
  return std::clamp<std::int64_t>(micro_tokens > 0 ? micro_tokens : fits, 1, std::max<std::int64_t>(1, group_tokens));
}

Forward::Sizes::Sizes(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                      std::int64_t max_tokens)
    : FeatureAxisSizes(configuration, shape, grid, max_tokens),
      chunk(decoded_at_a_time(configuration.data.micro_tokens, group, columns, scalar)),
      inputs((configuration.transcoder.auxk > 0 ? 2 : 1) * max_tokens * width),
      partial(chunk * columns),
      received(0),
      n_slots(overlap ? 2 : 1) {
  if (const std::int64_t ranks = grid.size(parallel::kFeatureAxis); ranks > 1)
    received = ranks * largest_own(chunk, group, ranks) * columns;
}

Forward::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                          std::int64_t max_tokens, training::StepArena& arena) {
  const Sizes sizes(configuration, shape, grid, max_tokens);
  const SelectionSizes selection =
      selection_sizes(with_largest_k(configuration.transcoder), selection_shape(configuration, shape, max_tokens), grid,
                      configuration.precision, arena.backend());
  const auto exchange = [&](std::int64_t elements, const parallel::ExchangeStrategy& strategy) {
    return arena.exchange(parallel::kFeatureAxis, sizes.bytes(elements), strategy);
  };
  arena.purpose("forward pass");
  arena.communicator(grid.size(parallel::kFeatureAxis), sizes.largest_message());
  staging = exchange(sizes.staged(arena) ? sizes.group * sizes.columns : 0, {});
  inputs = exchange(sizes.inputs, sizes.strategy.kept());
  own_inputs = RowGather::Buffers(sizes, arena);
  for (std::size_t slot = 0; slot < sizes.n_slots; ++slot)
    chunks.push_back({exchange(sizes.partial, sizes.strategy), exchange(sizes.received, sizes.strategy)});
  encode_workspace = arena.take<std::byte>(
      kernels::encode_workspace(arena.backend(), selection.tile_tokens, selection.tile_features, shape.d_model,
                                sizes.scalar, configuration.optimizer.state, sizes.scalar));
  decoder = DecoderForward::Buffers(configuration, shape, grid, max_tokens, sizes.group, sizes.chunk, arena);
  skip_workspace = arena.take<std::byte>(
      add_skip_workspace(configuration, shape, arena.backend(), std::min(sizes.chunk, sizes.own)));
  flags = arena.take<kernels::StepFlags>(1);
  if (shape.threshold) cuts = arena.take<float>(shape.n_layers * selection.max_features);
  if (lists_windows(configuration.transcoder)) {
    window_cuts = arena.take<float>(shape.n_layers * selection.max_features);
    active_offsets = arena.take<std::int64_t>(sizes.group + 1);
    active_key = arena.take<std::uint32_t>(selection.capacity);
    active_value = arena.take<float>(selection.capacity);
  }
  if (configuration.transcoder.ranking == Ranking::decoder_norm) {
    norms = arena.take<float>(shape.n_layers * selection.max_features);
    no_bias = arena.take<float>(selection.max_features);
  }
  if (configuration.transcoder.ranking == Ranking::z_score) {
    no_bias = arena.take<float>(selection.max_features);
    moments = FeatureMoments::Buffers(configuration, shape, grid, arena);
  }
  arena.count(training::StepArena::Where::device, selection.device_bytes + selection.rank_0_device_bytes);
  arena.count(training::StepArena::Where::host, selection.host_bytes + selection.rank_0_host_bytes);
}

Forward::Forward(const Configuration& configuration, const Model& model, const NormalisationOnDevice& normalisation,
                 const parallel::Grid& grid, const kernels::Execution& execution, report::Timers& timers,
                 std::int64_t max_tokens, training::StepArena& arena)
    : settings_(configuration.transcoder),
      model_(model),
      normalisation_(normalisation),
      grid_(grid),
      execution_(execution),
      timers_(timers),
      sizes_(configuration, model.shape(), grid.shape(), max_tokens),
      stream_(sizes_.overlap ? std::make_unique<device::Stream>(execution) : nullptr),
      communication_(stream_ ? stream_->execution() : execution),
      exchange_(grid.axis(parallel::kFeatureAxis), communication_, sizes_.largest_message(), sizes_.strategy),
      buffers_(configuration, model.shape(), grid.shape(), max_tokens, arena),
      decoder_(model, execution, buffers_.decoder),
      moments_(model, execution, buffers_.moments),
      axis_{exchange_,
            execution_,
            communication_,
            idle_,
            layer_blocks(model.shape().n_layers, sizes_.n_blocks),
            model.shape().d_model,
            sizes_.scalar,
            buffers_.staging.data()},
      selection_(make_selector(with_largest_k(configuration.transcoder),
                               selection_shape(configuration, model.shape(), max_tokens), grid, execution,
                               configuration.precision)),
      input_gather_(axis_, "inputs", buffers_.own_inputs),
      events_(sizes_.n_slots) {
  if (!stream_) exchange_.mark(&idle_);
  selection_->keep(settings_.k);
  if (buffers_.no_bias.size > 0) device::zero(execution, buffers_.no_bias);
  selection_->mark(&idle_);
  selection_->report_faults_to(&flags()->model_fault);
}

kernels::AnyMatrix Forward::inputs() const {
  return all_inputs().rows_from(layout_->group.begin, layout_->group.size());
}

kernels::AnyMatrix Forward::all_inputs() const {
  const std::int64_t width = model_.shape().width();
  return {buffers_.inputs.data(), sizes_.scalar, layout_->total, width, width};
}

void Forward::load(const dataset::RawBatch& batch) {
  timers_.phase("normalise");
  layout_.emplace(batch.n_tokens, grid_);
  device::zero(execution_, buffers_.flags);
  const std::int64_t d = model_.shape().d_model;
  for (std::size_t block = 0; block < axis_.blocks.size(); ++block) {
    const std::int64_t first = axis_.blocks[block].begin * d, columns = axis_.blocks[block].size() * d;
    kernels::normalise_rows(execution_, batch.inputs.columns_from(first, columns),
                            {normalisation_.input_mean.data() + first, columns},
                            {normalisation_.input_scale.data() + first, columns},
                            input_gather_.own(*layout_, inputs(), block), not_finite());
  }
}

/// Later work on `execution` waits until the inputs of a layer have arrived. Called before each product: layers ascend
/// in the first pass over the tiles, and later passes come after it.
void Forward::await_inputs(std::int64_t layer, const kernels::Execution& execution) {
  for (; blocks_here_ < axis_.blocks.size() && axis_.blocks[blocks_here_].begin <= layer; ++blocks_here_)
    input_gather_.wait(blocks_here_, execution);
}

/// True if own inputs of the first block are encoded while those of other ranks are in transit: they are in their
/// place.
bool Forward::begins_with_own_inputs() const {
  return axis_.blocks.size() > 1 && axis_.staging == nullptr && layout_->own.size() > 0;
}

/// Block by block of layers, as inputs arrive.
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

/// Selects what exceeds the thresholds as they are now, with a window also what is in it.
void Forward::select_above_cuts(std::span<const kernels::Array<const float>> bias, const kernels::JumpWindow* window) {
  const kernels::AnyMatrix thresholds = model_.thresholds();
  const std::int64_t n = thresholds.columns;
  const kernels::Array<const float> theta{static_cast<const float*>(thresholds.data), thresholds.rows * n};
  kernels::jump_cuts(execution_, jump_rule(settings_), theta, buffers_.cuts);
  if (window != nullptr) kernels::jump_window_cuts(execution_, *window, theta, buffers_.window_cuts);
  const float* const cuts = window != nullptr ? buffers_.window_cuts.data : buffers_.cuts.data;
  std::vector<kernels::Array<const float>> of_layer;
  for (std::int64_t s = 0; s < thresholds.rows; ++s) of_layer.push_back({cuts + s * n, n});
  select(bias, of_layer);
  if (window == nullptr) return;
  const kernels::SparseActivations& list = listed();
  activations_ = {list.n_tokens,       list.n_layers,
                  list.n_features,     {buffers_.active_offsets.data, list.n_tokens + 1},
                  buffers_.active_key, buffers_.active_value};
  kernels::restrict_features(execution_, {&list, 1}, 0, activations_, buffers_.cuts);
}

void Forward::gather_inputs() {
  for (std::size_t block = 0; block < axis_.blocks.size(); ++block) input_gather_.send(*layout_, inputs(), block);
  input_gather_.wait(axis_.blocks.size() - 1, execution_);
}

void Forward::encode(const kernels::JumpWindow* window, Selector* follower) {
  idle_.restart();
  follower_ = follower;
  std::vector<kernels::Array<const float>> bias;
  for (const kernels::ParameterVector& vector : model_.encoder_bias()) bias.push_back(vector.weight);
  timers_.phase("exchange");
  for (std::size_t block = 0; block < axis_.blocks.size(); ++block) input_gather_.send(*layout_, inputs(), block);
  blocks_here_ = 0;
  if (settings_.activation == Activation::jumprelu) {
    select_above_cuts(bias, window);
    if (window != nullptr) return;
  } else if (ranks_by_decoder()) {
    encode_by_norm();
  } else if (settings_.ranking == Ranking::z_score) {
    encode_by_z_score();
  } else {
    select(bias, {});
  }
  activations_ = listed();
}

/// Selects by the products of pre-activations and norms of decoder rows.
void Forward::encode_by_norm() {
  const std::int64_t n = model_.n_local();
  const kernels::Array<const float> norms{buffers_.norms.data, model_.shape().n_layers * n};
  if (n > 0) feature_norms(execution_, model_.shape(), model_.decoder(), {buffers_.norms.data, norms.size});
  const std::vector<kernels::Array<const float>> no_bias(model_.encoder().size(), {buffers_.no_bias.data, n});
  timers_.phase("select");
  selection_->select(layout_->total, no_bias,
                     [&](const kernels::Execution& execution, const TileRequest& tile, kernels::AnyMatrix product) {
                       encode_tile(execution, tile, product);
                       const kernels::Array<float> bias =
                           model_.encoder_bias()[static_cast<std::size_t>(tile.layer)].weight;
                       kernels::rank_tile(execution, product, {bias.data + tile.feature_begin, tile.feature_count},
                                          {norms.data + tile.layer * n + tile.feature_begin, tile.feature_count});
                     });
  kernels::unrank(execution_, listed(), norms);
}

/// Selects by pre-activations in deviations of the batch from their mean.
void Forward::encode_by_z_score() {
  const std::int64_t n = model_.n_local(), n_layers = model_.shape().n_layers;
  timers_.phase("moments");
  await_inputs(n_layers - 1, execution_);
  moments_.form(inputs());
  const std::vector<kernels::Array<const float>> no_bias(model_.encoder().size(), {buffers_.no_bias.data, n});
  timers_.phase("select");
  selection_->select(
      layout_->total, no_bias,
      [&](const kernels::Execution& execution, const TileRequest& tile, kernels::AnyMatrix product) {
        encode_tile(execution, tile, product);
        const kernels::Array<float> bias = model_.encoder_bias()[static_cast<std::size_t>(tile.layer)].weight;
        const auto of_tile = [&](kernels::Array<const float> all) -> kernels::Array<const float> {
          return {all.data + tile.layer * n + tile.feature_begin, tile.feature_count};
        };
        kernels::standardise_tile(execution, product, {bias.data + tile.feature_begin, tile.feature_count},
                                  of_tile(moments_.mean()), of_tile(moments_.spread()));
      });
  kernels::unstandardise(execution_, listed(), moments_.mean(), moments_.spread());
}

void Forward::encode_tile(const kernels::Execution& execution, const TileRequest& tile, kernels::AnyMatrix product) {
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
                     std::span<const kernels::Array<const float>> cuts) {
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
      [&](const kernels::Execution& execution, const TileRequest& tile, kernels::AnyMatrix product) {
        encode_tile(execution, tile, product);
      },
      cuts, follower_ != nullptr ? nullptr : &operands);
}

bool Forward::selections_are_valid() {
  std::int64_t faults = selection_->first_fault().empty() ? 0 : 1;
  grid_.world().maximum(std::span<std::int64_t>(&faults, 1));
  return faults == 0;
}

void Forward::require_valid_selections(const std::string& which) {
  const std::string fault = selection_->first_fault();
  std::optional<parallel::Failure> own;
  if (!fault.empty()) own = parallel::Failure{ExitCode::internal, fault};
  const auto failure = parallel::agree(grid_.world(), own);
  if (failure && settings_.capacity > 0 && !kernels::activation_keeps_k(settings_.activation))
    throw collective_error(ExitCode::usage,
                           "the selection {} needs more room, {} (transcoder.activation keeps every feature above its "
                           "threshold{}, transcoder.capacity = {} is for {} per token and layer); raise "
                           "transcoder.capacity, or begin with larger thresholds",
                           which, failure->message,
                           lists_windows(settings_) ? ", and training lists those in the window below it" : "",
                           settings_.capacity, settings_.capacity);
  if (failure)
    throw collective_error(
        ExitCode::internal,
        "the selection {} is not valid, {} (the encoder's products differ between two passes over the "
        "same tiles); start again; if it happens again, report it with log.txt and run.json",
        which, failure->message);
}

void Forward::by_feature() {
  timers_.phase("transpose");
  selection_->transpose();
}

void Forward::decode(const kernels::SparseActivations& activations, bool with_skip,
                     const std::function<void(const OwnPart&)>& consume) {
  struct Decoded {
    OwnPart part;
    std::size_t slot;
  };
  const std::int64_t d = model_.shape().d_model;
  const auto give = [&](const Decoded& decoded) {
    if (stream_) {
      idle_.begin(execution_);
      events_[decoded.slot].arrived.hold_back(execution_);
      idle_.end(execution_);
    }
    const OwnPart& part = decoded.part;
    if (part.count > 0 && with_skip) {
      timers_.phase("skip");
      const kernels::AnyMatrix x = inputs().rows_from(layout_->own.begin + part.begin, part.count);
      add_skip(execution_, model_.skip(), x, part.layers, part.partial.rows_from(0, part.count),
               buffers_.skip_workspace);
    }
    if (part.count > 0) consume(part);
    buffers_.chunks[decoded.slot].partial.close();
    buffers_.chunks[decoded.slot].received.close();
  };

  timers_.phase("decode");
  decoder_.begin(activations);
  // The encoder has awaited all inputs, unless this rank has no features.
  if (with_skip) await_inputs(model_.shape().n_layers - 1, execution_);
  std::optional<Decoded> under_way;
  std::size_t slot = 0;
  // The first layers have the shortest sums: the exchange begins soon, and the last layers take longest to decode,
  // which hides what was sent before.
  for (std::size_t block = 0; block < axis_.blocks.size(); ++block)
    for (std::int64_t begin = 0; begin < layout_->group.size(); begin += sizes_.chunk) {
      timers_.phase("decode");
      ChunkBuffers& buffers = buffers_.chunks[slot];
      const parallel::Range layers = axis_.blocks[block];
      const parallel::Range chunk{begin, std::min(begin + sizes_.chunk, layout_->group.size())};
      const parallel::Range own = intersection(chunk, layout_->own);
      const std::int64_t columns = layers.size() * d;
      const kernels::AnyMatrix partial{buffers.partial.open(), sizes_.scalar, chunk.size(), columns, columns};
      decoder_.form(chunk, layers, partial);
      OwnPart part{own.begin - layout_->own.begin, own.size(), block, layers, partial, 1};
      if (exchange_.size() > 1) {
        timers_.phase("exchange");
        // Own slices lie in rank order, so the rows of the chunk are already in the order of their destinations.
        std::vector<std::int64_t> bytes;
        for (const parallel::Range& slice : layout_->own_of_rank)
          bytes.push_back(sizes_.bytes(intersection(chunk, slice).size() * columns));
        events_[slot].decoded.record(execution_);
        events_[slot].decoded.hold_back(communication_);
        exchange_.send_to_owners(partial.data, bytes, buffers.received.open(), "partial sums");
        events_[slot].arrived.record(communication_);
        part.n_parts = exchange_.size();
        part.partial = {buffers.received.data(), sizes_.scalar, part.n_parts * own.size(), columns, columns};
      }
      // With a second slot the next chunk is decoded before this one is used.
      if (under_way) give(*under_way);
      under_way = Decoded{part, slot};
      if (sizes_.n_slots == 1) give(*std::exchange(under_way, std::nullopt));
      slot = (slot + 1) % sizes_.n_slots;
    }
  if (under_way) give(*under_way);
}

}  // namespace weft::transcoder
