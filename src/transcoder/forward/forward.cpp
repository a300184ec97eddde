// SPDX-License-Identifier: Apache-2.0
#include "transcoder/forward/forward.hpp"

#include <algorithm>
#include <utility>

#include "kernels/convert/convert_rows.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "parallel/failure.hpp"
#include "transcoder/decoder/kinds.hpp"
#include "transcoder/forward/skip.hpp"
#include "transcoder/selection/drivers.hpp"

namespace weft::transcoder {
namespace {

constexpr std::int64_t kLargestPartial = std::int64_t{512} << 20;

/// Largest number of own tokens that one chunk can hold: slices are contiguous, so it is bounded by both.
std::int64_t largest_own(std::int64_t chunk, std::int64_t group, std::int64_t feature_ranks) {
  return std::min(chunk, parallel::largest_part(group, feature_ranks));
}

}  // namespace

std::int64_t decoded_at_a_time(std::int64_t micro_tokens, std::int64_t group_tokens, std::int64_t columns,
                               kernels::Scalar scalar) {
  const std::int64_t fits = std::max<std::int64_t>(1, kLargestPartial / (columns * kernels::bytes_of(scalar)));
  return std::clamp<std::int64_t>(micro_tokens > 0 ? micro_tokens : fits, 1, std::max<std::int64_t>(1, group_tokens));
}

Forward::Sizes::Sizes(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                      std::int64_t max_tokens)
    : FeatureAxisSizes(configuration, shape, grid, max_tokens),
      chunk(decoded_at_a_time(configuration.data.micro_tokens, group, columns, scalar)),
      inputs(backward_batches(configuration.transcoder) * max_tokens * width),
      partial(chunk * columns),
      received(0),
      n_slots(overlap ? 2 : 1) {
  if (const std::int64_t ranks = grid.size(parallel::kFeatureAxis); ranks > 1)
    received = ranks * largest_own(chunk, group, ranks) * columns;
}

Forward::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                          std::int64_t max_tokens, model::StepArena& arena)
    : selection(selection_spec(configuration, shape, grid, max_tokens, arena.backend()),
                arena.purpose("forward pass")) {
  const Sizes sizes(configuration, shape, grid, max_tokens);
  const auto exchange = [&](std::int64_t elements, const parallel::ExchangeStrategy& strategy) {
    return arena.exchange(parallel::kFeatureAxis, sizes.bytes(elements), strategy);
  };
  arena.communicator(grid.size(parallel::kFeatureAxis), sizes.largest_message());
  staging = exchange(sizes.staged(arena) ? sizes.group * sizes.columns : 0, {});
  inputs = exchange(sizes.inputs, sizes.strategy.kept());
  own_inputs = RowGather::Buffers(sizes, arena);
  for (std::size_t slot = 0; slot < sizes.n_slots; ++slot)
    chunks.push_back({exchange(sizes.partial, sizes.strategy), exchange(sizes.received, sizes.strategy)});
  encode_workspace = arena.take<std::byte>(
      kernels::encode_workspace(arena.backend(), selection.sizes.tile_tokens, selection.sizes.tile_features,
                                shape.d_model, sizes.scalar, configuration.optimizer.state, sizes.scalar));
  decoder = make_decoder({configuration, shape, grid}, {max_tokens, sizes.group}, arena);
  skip_workspace = arena.take<std::byte>(
      add_skip_workspace(configuration, shape, arena.backend(), std::min(sizes.chunk, sizes.own)));
  flags = arena.take<kernels::StepFlags>(1);
  if (shape.threshold) bounds = arena.take<float>(shape.n_layers * selection.sizes.max_features);
  if (lists_bands(configuration.transcoder)) {
    band_bounds = arena.take<float>(shape.n_layers * selection.sizes.max_features);
    active_offsets = arena.take<std::int64_t>(sizes.group + 1);
    active_key = arena.take<std::uint32_t>(selection.sizes.capacity);
    active_value = arena.take<float>(selection.sizes.capacity);
  }
  if (configuration.transcoder.ranking == Ranking::decoder_norm) {
    norms = arena.take<float>(shape.n_layers * selection.sizes.max_features);
    no_bias = arena.take<float>(selection.sizes.max_features);
  }
  if (configuration.transcoder.ranking == Ranking::z_score) {
    no_bias = arena.take<float>(selection.sizes.max_features);
    statistics = FeatureStatistics::Buffers(configuration, shape, grid, arena);
  }
}

Forward::Forward(const Configuration& configuration, const Model& model, const NormalisationOnDevice& normalisation,
                 const parallel::Grid& grid, const kernels::Execution& execution, run::Timers& timers,
                 std::int64_t max_tokens, model::StepArena& arena)
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
      statistics_(model, execution, buffers_.statistics),
      axis_{exchange_,
            execution_,
            communication_,
            idle_,
            layer_blocks(model.shape().n_layers, sizes_.n_blocks),
            model.shape().d_model,
            sizes_.scalar,
            buffers_.staging.data()},
      selection_(
          make_selector(selection_spec(configuration, model.shape(), grid.shape(), max_tokens, execution.backend),
                        buffers_.selection, grid, execution)),
      input_gather_(axis_, "inputs", buffers_.own_inputs),
      events_(sizes_.n_slots) {
  buffers_.decoder->attach(model, execution);
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
                           lists_bands(settings_) ? ", and training lists those in the band below it" : "",
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

}  // namespace weft::transcoder
