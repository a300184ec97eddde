// SPDX-License-Identifier: Apache-2.0
//
// Sizes, the part that all drivers share, and the choice of the driver.
#include "transcoder/selection/selection.hpp"

#include <algorithm>
#include <limits>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "kernels/runtime.hpp"
#include "transcoder/benchmark/selection_in_pieces.hpp"
#include "transcoder/benchmark/selection_on_rank_0.hpp"
#include "transcoder/selection/device_selector.hpp"
#include "transcoder/selection/host_selector.hpp"

namespace weft::transcoder {
namespace {

using kernels::activation_keeps_k;
using kernels::Array;

constexpr std::int64_t kTileTokens = 1024;                       // at most
constexpr std::int64_t kTileBytes = std::int64_t{4} << 20;       // stays in a processor's cache
constexpr std::int64_t kLargestGpuTile = std::int64_t{1} << 30;  // few, large products for a GPU
constexpr std::int64_t kRepeatedTile = std::int64_t{1} << 28;    // where they may be filtered as they are formed
constexpr std::int64_t kTileFeatures = 64;                       // a multiple of this
constexpr std::int64_t kLargestIndex = std::int64_t{1} << 32;

constexpr std::int64_t rounded_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// True if a GPU may filter products as it forms them (kernels/transcoder/select/hopper_filter.hpp). Tiles then serve
/// repeated passes alone; a GPU that cannot loses little with smaller ones.
bool tiles_repeat(const SelectionSpec& spec) {
  return spec.settings.activation == Activation::batch_topk && spec.settings.ranking == Ranking::value &&
         spec.settings.auxk == 0 && spec.product() == kernels::Scalar::bf16;
}

void set_tile(const SelectionSpec& spec, SelectionSizes& sizes) {
  const bool on_gpu = spec.backend == kernels::Backend::cuda;
  const std::int64_t columns = kTileFeatures * kernels::bytes_of(spec.product());
  const std::int64_t tile_bytes = spec.shape.tile_bytes > 0 ? spec.shape.tile_bytes
                                  : !on_gpu                 ? kTileBytes
                                  : tiles_repeat(spec)      ? kRepeatedTile
                                                            : kLargestGpuTile;
  sizes.tile_tokens = std::min(
      {sizes.max_tokens, on_gpu ? sizes.max_tokens : kTileTokens, std::max<std::int64_t>(16, tile_bytes / columns)});
  const std::int64_t widest = std::max<std::int64_t>(1, tile_bytes / (columns * sizes.tile_tokens)) * kTileFeatures;
  const std::int64_t n_blocks = (sizes.max_features + widest - 1) / widest;
  sizes.tile_features =
      std::min(sizes.max_features, rounded_up((sizes.max_features + n_blocks - 1) / n_blocks, kTileFeatures));
}

void check_capacity(const SelectionSpec& spec, const SelectionSizes& sizes) {
  const std::int64_t updated =
      spec.grid.size(parallel::kDataAxis) == 1 ? 0 : owned_list_capacity(spec.settings, spec.shape, spec.grid);
  const std::int64_t most = std::max(sizes.capacity, updated);
  if (most >= kLargestIndex || spec.shape.n_layers * spec.shape.n_features >= kLargestIndex)
    throw collective_error(ExitCode::usage,
                           "the selection needs room for {} active entries on a rank (at most 2^32 are possible); take "
                           "a smaller {}, a smaller batch or more ranks",
                           most, activation_keeps_k(spec.settings.activation) ? "transcoder.k" : "transcoder.capacity");
}

bool is_on_rank_0(const SelectionSpec& spec) {
  return spec.shape.exchange.selection == SelectionPlace::rank_0 && spec.grid.ranks() > 1;
}

}  // namespace

std::int64_t selection_budget(const ModelSettings& settings, std::int64_t n_layers, std::int64_t n_tokens_total) {
  if (!activation_keeps_k(settings.activation)) return std::numeric_limits<std::int64_t>::max();
  return kernels::selection_budget(settings.k, settings.scope == Scope::all_layers ? n_layers : 1,
                                   settings.activation == Activation::batch_topk ? n_tokens_total : 1);
}

std::int64_t list_capacity(const ModelSettings& settings, const SelectionShape& shape,
                           const parallel::GridShape& grid) {
  const std::int64_t n_groups = settings.scope == Scope::layer ? shape.n_layers : 1;
  const std::int64_t budget = selection_budget(settings, shape.n_layers, shape.max_tokens);
  const std::int64_t n_tokens = parallel::largest_part(shape.max_tokens, grid.size(parallel::kDataAxis)),
                     per_token = shape.n_layers / n_groups *
                                 parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis));
  if (!activation_keeps_k(settings.activation)) {
    const std::int64_t all = n_groups * n_tokens * per_token;
    if (settings.capacity == 0) return all;
    const std::int64_t per_layer =
        std::min(parallel::largest_part(settings.capacity, grid.size(parallel::kFeatureAxis)), shape.n_features);
    return std::min(all, n_tokens * shape.n_layers * per_layer);
  }
  return settings.activation == Activation::topk ? n_tokens * n_groups * std::min(budget, per_token)
                                                 : n_groups * std::min(budget, n_tokens * per_token);
}

std::int64_t owned_list_capacity(const ModelSettings& settings, const SelectionShape& shape,
                                 const parallel::GridShape& grid) {
  // A slice of the features over all tokens: the lists of a rank if all ranks were on the feature axis.
  const parallel::GridShape slices = parallel::data_by_feature(1, grid.ranks());
  if (activation_keeps_k(settings.activation)) return list_capacity(settings, shape, slices);
  ModelSettings unbounded = settings;
  unbounded.capacity = 0;
  return std::min(list_capacity(unbounded, shape, slices),
                  grid.size(parallel::kDataAxis) * list_capacity(settings, shape, grid));
}

SelectionSizes selection_sizes(const ModelSettings& settings, const SelectionShape& shape,
                               const parallel::GridShape& grid, Precision precision, kernels::Backend backend) {
  const SelectionSpec spec{settings, shape, grid, precision, backend};
  SelectionSizes sizes;
  sizes.max_tokens = parallel::largest_part(shape.max_tokens, grid.size(parallel::kDataAxis));
  sizes.max_features = parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis));
  sizes.n_groups = settings.scope == Scope::layer ? shape.n_layers : 1;
  sizes.capacity = list_capacity(settings, shape, grid);
  set_tile(spec, sizes);
  check_capacity(spec, sizes);

  PlacedArrays<Selector::ResultArrays>::add_bytes(spec, sizes);
  if (is_on_rank_0(spec)) {
    add_bytes_on_rank_0(spec, sizes);
    return sizes;
  }
  if constexpr (kernels::kCudaBuild)
    if (backend == kernels::Backend::cuda) {
      add_device_selector_bytes(spec, sizes);
      return sizes;
    }
  add_host_selector_bytes(spec, sizes);
  return sizes;
}

std::unique_ptr<Selector> make_selector(const ModelSettings& settings, const SelectionShape& shape,
                                        const parallel::Grid& grid, const kernels::Execution& execution,
                                        Precision precision) {
  const SelectionSpec spec{settings, shape, grid.shape(), precision, execution.backend};
  const SelectionSizes sizes = selection_sizes(settings, shape, grid.shape(), precision, execution.backend);
  if (is_on_rank_0(spec)) return make_selector_on_rank_0(spec, sizes, grid, execution);
  SumDecorator decorate = [](SumOverRanks sum) { return sum; };
  if (!shape.exchange.together) decorate = sum_in_pieces;
  if constexpr (kernels::kCudaBuild)
    if (execution.backend == kernels::Backend::cuda)
      return make_device_selector(spec, sizes, grid, execution, decorate);
  return make_host_selector(spec, sizes, grid, execution, decorate);
}

// ---- Selector -------------------------------------------------------------------------------------------------------

Selector::ResultArrays::ResultArrays(const SelectionSpec& spec, const SelectionSizes& sizes, kernels::Workspace& device,
                                     kernels::Workspace& host) {
  const std::int64_t n_keys = spec.shape.n_layers * sizes.max_features;
  row_offsets = device.take<std::int64_t>(sizes.max_tokens + 1);
  key = device.take<std::uint32_t>(sizes.capacity);
  value = device.take<float>(sizes.capacity);
  hit_offsets = device.take<std::int64_t>(n_keys + 1);
  hit_token = device.take<std::uint32_t>(sizes.capacity);
  hit_position = device.take<std::uint32_t>(sizes.capacity);
  transpose_workspace = device.take<std::byte>(kernels::transpose_workspace(spec.backend, n_keys, sizes.capacity));
  n_entries = host.take<std::int64_t>(1);
}

Selector::Selector(const SelectionSpec& spec, const SelectionSizes& sizes, const parallel::Grid& grid,
                   const kernels::Execution& execution)
    : spec_(spec), sizes_(sizes), grid_(grid), execution_(execution), k_(spec.settings.k), result_(spec, sizes) {}

/// The parts of a batch that follow from its size. The arrays of the result are those of this batch from now on.
Selector::Batch Selector::start(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer) {
  const SelectionShape& shape = spec_.shape;
  if (n_tokens_total < 1 || n_tokens_total > shape.max_tokens)
    throw error(ExitCode::internal, "the selector was given a batch of {} tokens (it was made for at most {})",
                n_tokens_total, shape.max_tokens);
  WEFT_ASSERT(static_cast<std::int64_t>(bias_of_layer.size()) == shape.n_layers);
  ModelSettings settings = spec_.settings;
  settings.k = k_;
  const Batch batch{.n_tokens_total = n_tokens_total,
                    .n_tokens = grid_.part(parallel::kDataAxis, n_tokens_total).size(),
                    .features = grid_.part(parallel::kFeatureAxis, shape.n_features),
                    .budget = selection_budget(settings, shape.n_layers, n_tokens_total),
                    .bias = bias_of_layer};
  statistics_ = {};
  activations_ = {batch.n_tokens,        shape.n_layers,
                  batch.features.size(), {result_->row_offsets.data, batch.n_tokens + 1},
                  result_->key,          result_->value};
  hits_ = {{result_->hit_offsets.data, shape.n_layers * batch.features.size() + 1},
           result_->hit_token,
           result_->hit_position};
  return batch;
}

void Selector::select(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer,
                      const Producer& produce, std::span<const Array<const float>> cut_of_layer,
                      const kernels::EncoderOperands* operands) {
  WEFT_ASSERT(!spec_.shape.follows);
  WEFT_ASSERT(cut_of_layer.size() ==
              (spec_.settings.activation == Activation::jumprelu ? bias_of_layer.size() : std::size_t{0}));
  Batch batch = start(n_tokens_total, bias_of_layer);
  batch.cut = cut_of_layer;
  batch.produce = &produce;
  batch.operands = operands;
  select_batch(batch);
}

void Selector::follow(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer) {
  WEFT_ASSERT(spec_.shape.follows && spec_.settings.activation == Activation::topk);
  followed_ = start(n_tokens_total, bias_of_layer);
  begin();
}

void Selector::begin() { throw error(ExitCode::internal, "this selector does not follow another one"); }
void Selector::take(const kernels::Execution&, const TileRequest&, kernels::AnyMatrix) { begin(); }
void Selector::finish() { begin(); }

void Selector::transpose() { kernels::transpose(execution_, activations_, hits_, result_->transpose_workspace); }

const SelectionStatistics& Selector::statistics() {
  if (activations_.row_offsets.data == nullptr) return statistics_;  // nothing was selected yet
  if (activations_.n_tokens > 0) {
    device::copy(execution_, result_->n_entries.data, activations_.row_offsets.data + activations_.n_tokens,
                 sizeof(std::int64_t), device::Direction::to_host);
    kernels::fence(execution_);
    statistics_.entries = result_->n_entries[0];
  }
  read_statistics();
  return statistics_;
}

}  // namespace weft::transcoder
