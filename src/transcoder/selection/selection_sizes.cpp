// SPDX-License-Identifier: Apache-2.0
#include "transcoder/selection/selection_sizes.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"
#include "kernels/transcoder/select/selection_rule.hpp"

namespace weft::transcoder {
namespace {

using kernels::activation_keeps_k;

constexpr std::int64_t kTileTokens = 1024;                       // largest number of tokens
constexpr std::int64_t kTileBytes = std::int64_t{4} << 20;       // stays in a processor's cache
constexpr std::int64_t kLargestGpuTile = std::int64_t{1} << 30;  // few, large products for a GPU
constexpr std::int64_t kRepeatedTile = std::int64_t{1} << 28;    // where products may be filtered as they are formed
constexpr std::int64_t kTileFeatures = 64;                       // features are a multiple of this
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
  const std::int64_t tile_bytes = spec.tile_bytes > 0  ? spec.tile_bytes
                                  : !on_gpu            ? kTileBytes
                                  : tiles_repeat(spec) ? kRepeatedTile
                                                       : kLargestGpuTile;
  sizes.tile_tokens = std::min(
      {sizes.max_tokens, on_gpu ? sizes.max_tokens : kTileTokens, std::max<std::int64_t>(16, tile_bytes / columns)});
  const std::int64_t widest = std::max<std::int64_t>(1, tile_bytes / (columns * sizes.tile_tokens)) * kTileFeatures;
  const std::int64_t n_blocks = (sizes.max_features + widest - 1) / widest;
  sizes.tile_features =
      std::min(sizes.max_features, rounded_up((sizes.max_features + n_blocks - 1) / n_blocks, kTileFeatures));
}

void check_capacity(const SelectionSpec& spec, const SelectionSizes& sizes) {
  const std::int64_t updated = spec.grid.size(parallel::kDataAxis) == 1 ? 0 : owned_list_capacity(spec);
  const std::int64_t most = std::max(sizes.capacity, updated);
  if (most >= kLargestIndex || spec.n_layers * spec.n_features >= kLargestIndex)
    throw collective_error(ExitCode::usage,
                           "the selection needs room for {} active entries on a rank (at most 2^32 are possible); take "
                           "a smaller {}, a smaller batch or more ranks",
                           most, activation_keeps_k(spec.settings.activation) ? "transcoder.k" : "transcoder.capacity");
}

}  // namespace

SelectionSpec selection_spec(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                             std::int64_t max_tokens, kernels::Backend backend) {
  return {.settings = with_largest_k(configuration.transcoder),
          .n_layers = shape.n_layers,
          .n_features = shape.n_features,
          .max_tokens = max_tokens,
          .grid = grid,
          .precision = configuration.precision,
          .backend = backend,
          .tile_bytes = configuration.tile << 20,
          .exchange = configuration.parallel.exchange,
          .factory = configuration.alternatives.selector};
}

SelectionSpec dead_feature_selection(SelectionSpec spec) {
  ModelSettings& settings = spec.settings;
  settings.activation = Activation::topk;
  settings.scope = Scope::layer;
  settings.k_initial = 0;
  settings.k = static_cast<double>(std::min(settings.auxk_features, settings.features));
  spec.factory = nullptr;  // only the drivers can follow
  spec.follows = true;
  return spec;
}

SelectionSizes::SelectionSizes(const SelectionSpec& spec)
    : max_tokens(parallel::largest_part(spec.max_tokens, spec.grid.size(parallel::kDataAxis))),
      max_features(parallel::largest_part(spec.n_features, spec.grid.size(parallel::kFeatureAxis))),
      n_groups(spec.settings.scope == Scope::layer ? spec.n_layers : 1),
      capacity(list_capacity(spec)) {
  set_tile(spec, *this);
  check_capacity(spec, *this);
}

std::int64_t selection_budget(const ModelSettings& settings, std::int64_t n_layers, std::int64_t n_tokens_total) {
  if (!activation_keeps_k(settings.activation)) return std::numeric_limits<std::int64_t>::max();
  return kernels::selection_budget(settings.k, settings.scope == Scope::all_layers ? n_layers : 1,
                                   settings.activation == Activation::batch_topk ? n_tokens_total : 1);
}

std::int64_t list_capacity(const SelectionSpec& spec) {
  const ModelSettings& settings = spec.settings;
  const parallel::GridShape& grid = spec.grid;
  const std::int64_t n_groups = settings.scope == Scope::layer ? spec.n_layers : 1;
  const std::int64_t budget = selection_budget(settings, spec.n_layers, spec.max_tokens);
  const std::int64_t n_tokens = parallel::largest_part(spec.max_tokens, grid.size(parallel::kDataAxis)),
                     per_token = spec.n_layers / n_groups *
                                 parallel::largest_part(spec.n_features, grid.size(parallel::kFeatureAxis));
  if (!activation_keeps_k(settings.activation)) {
    const std::int64_t all = n_groups * n_tokens * per_token;
    if (settings.capacity == 0) return all;
    const std::int64_t per_layer =
        std::min(parallel::largest_part(settings.capacity, grid.size(parallel::kFeatureAxis)), spec.n_features);
    return std::min(all, n_tokens * spec.n_layers * per_layer);
  }
  return settings.activation == Activation::topk ? n_tokens * n_groups * std::min(budget, per_token)
                                                 : n_groups * std::min(budget, n_tokens * per_token);
}

std::int64_t owned_list_capacity(const SelectionSpec& spec) {
  // The lists of a slice of the features over all tokens are those of a rank if all ranks were on the feature axis.
  SelectionSpec slices = spec;
  slices.grid = parallel::data_by_feature(1, spec.grid.ranks());
  if (activation_keeps_k(spec.settings.activation)) return list_capacity(slices);
  slices.settings.capacity = 0;
  return std::min(list_capacity(slices), spec.grid.size(parallel::kDataAxis) * list_capacity(spec));
}

}  // namespace weft::transcoder
