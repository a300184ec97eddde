// SPDX-License-Identifier: Apache-2.0
#include "transcoder/axes/feature_axis.hpp"

#include <algorithm>

namespace weft::transcoder {
namespace {

bool exchanges_overlap(const Configuration& configuration, const parallel::GridShape& grid) {
  return kernels::kCudaBuild && grid.size(parallel::kFeatureAxis) > 1 && configuration.parallel.blocks > 1 &&
         configuration.parallel.exchange.observer == nullptr;
}

std::int64_t exchange_blocks(const Configuration& configuration, std::int64_t n_layers,
                             const parallel::GridShape& grid) {
  if (configuration.transcoder.decoder == Decoder::tied) return 1;  // it sums over layers
  if (grid.size(parallel::kFeatureAxis) > 1 && configuration.alternatives.rows_by_layer) return n_layers;
  return exchanges_overlap(configuration, grid) ? std::min(configuration.parallel.blocks, n_layers) : 1;
}

std::int64_t largest_block(std::int64_t n_layers, std::int64_t n_blocks) {
  std::int64_t largest = 0;
  for (const parallel::Range& block : layer_blocks(n_layers, n_blocks)) largest = std::max(largest, block.size());
  return largest;
}

}  // namespace

kernels::Scalar scalar_of(Precision precision) {
  return precision == Precision::bf16 ? kernels::Scalar::bf16 : kernels::Scalar::fp32;
}

std::vector<parallel::Range> layer_blocks(std::int64_t n_layers, std::int64_t n_blocks) {
  std::vector<parallel::Range> blocks;
  std::int64_t begin = 0;
  for (std::int64_t i = 1; i <= n_blocks; ++i) {
    // Sizes are rounded; each block has at least one layer.
    const std::int64_t all = n_blocks * (n_blocks + 1) / 2, share = i == n_blocks ? all : (i + 1) * (i + 2) / 2 - 2;
    const std::int64_t end = std::clamp((2 * n_layers * share + all) / (2 * all), begin + 1, n_layers - (n_blocks - i));
    blocks.push_back({begin, end});
    begin = end;
  }
  return blocks;
}

FeatureAxisSizes::FeatureAxisSizes(const Configuration& configuration, const Shape& shape,
                                   const parallel::GridShape& grid, std::int64_t max_tokens)
    : strategy(configuration.parallel.exchange),
      scalar(scalar_of(configuration.precision)),
      overlap(exchanges_overlap(configuration, grid)),
      group(parallel::largest_part(max_tokens, grid.size(parallel::kDataAxis))),
      own(parallel::largest_part(group, grid.size(parallel::kFeatureAxis))),
      width(shape.width()),
      n_blocks(exchange_blocks(configuration, shape.n_layers, grid)),
      columns(largest_block(shape.n_layers, n_blocks) * shape.d_model) {}

bool FeatureAxisSizes::staged(const model::StepArena& arena) const {
  return n_blocks > 1 && !arena.is_direct(parallel::kFeatureAxis, strategy);
}

}  // namespace weft::transcoder
