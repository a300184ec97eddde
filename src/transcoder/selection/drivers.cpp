// SPDX-License-Identifier: Apache-2.0
#include "transcoder/selection/drivers.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "transcoder/selection/device_selector.hpp"
#include "transcoder/selection/host_selector.hpp"

namespace weft::transcoder {
namespace {

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
    throw collective_error(
        ExitCode::usage,
        "the selection needs room for {} active entries on a rank (at most 2^32 are possible); take "
        "a smaller {}, a smaller batch or more ranks",
        most, kernels::activation_keeps_k(spec.settings.activation) ? "transcoder.k" : "transcoder.capacity");
}

}  // namespace

void add_driver_bytes(const SelectionSpec& spec, SelectionSizes& sizes) {
  if constexpr (kernels::kCudaBuild)
    if (spec.backend == kernels::Backend::cuda) return add_device_selector_bytes(spec, sizes);
  add_host_selector_bytes(spec, sizes);
}

std::unique_ptr<Selector> make_driver(const SelectionSpec& spec, const SelectionSizes& sizes,
                                      const parallel::Grid& grid, const kernels::Execution& execution,
                                      const SumDecorator& decorate) {
  if constexpr (kernels::kCudaBuild)
    if (execution.backend == kernels::Backend::cuda)
      return make_device_selector(spec, sizes, grid, execution, decorate);
  return make_host_selector(spec, sizes, grid, execution, decorate);
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
  Selector::add_bytes(spec, sizes);
  if (shape.factory != nullptr)
    shape.factory->add_bytes(spec, sizes);
  else
    add_driver_bytes(spec, sizes);
  return sizes;
}

std::unique_ptr<Selector> make_selector(const ModelSettings& settings, const SelectionShape& shape,
                                        const parallel::Grid& grid, const kernels::Execution& execution,
                                        Precision precision) {
  const SelectionSpec spec{settings, shape, grid.shape(), precision, execution.backend};
  const SelectionSizes sizes = selection_sizes(settings, shape, grid.shape(), precision, execution.backend);
  return shape.factory != nullptr ? shape.factory->make(spec, sizes, grid, execution)
                                  : make_driver(spec, sizes, grid, execution);
}

}  // namespace weft::transcoder
