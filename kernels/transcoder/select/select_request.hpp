// SPDX-License-Identifier: Apache-2.0
//
// What is asked of a selection on a GPU (select_cuda.hpp), and why one can fail.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/shared_memory.hpp"
#include "kernels/transcoder/select/selection_rule.hpp"

namespace weft::kernels::cuda {

/// Largest number of entries that `topk` keeps for a token and group: the list is in shared memory.
constexpr std::int64_t kMostPerToken = 8192;

/// Words of shared memory of topk for a budget: the bins and largest keys of keep_best (2,048), or the list and at
/// least 1,024 new entries. More are sorted less often; beyond 8,192 a power of two would be too many for GPUs with
/// 99 KB.
constexpr int topk_room(std::int64_t budget) {
  constexpr int kLargest = 8192;
  int room = 2048;
  while (room < kLargest && room < budget + 1024) room *= 2;
  return room < budget + 1024 ? static_cast<int>(budget + 1024) : room;
}
static_assert(topk_room(kMostPerToken) * std::int64_t{sizeof(std::uint64_t)} <= kSharedMemory - 6 * 1024,
              "with the static variables of keep_best");

/// Position of a rank in a grid of shards of the features and slices of the batch. Shards hold consecutive features,
/// slices consecutive tokens.
struct ShardPosition {
  std::int64_t feature_ranks = 1;
  std::int64_t feature_index = 0;
  std::int64_t data_ranks = 1;
  std::int64_t data_index = 0;
  std::int64_t feature_begin = 0;     ///< this rank's first feature
  std::int64_t n_features_total = 0;  ///< per layer, over all ranks; 0: only this rank has features
};

/// Sizes of a selection on one rank, for the largest batch.
struct SelectionRequest {
  SelectionRule rule = SelectionRule::batch_topk;
  bool all_layers = false;  ///< one group for all layers (topk: of a token), else one per layer
  std::int64_t n_tokens = 0;
  std::int64_t n_layers = 0;
  std::int64_t n_features = 0;  ///< per layer; may be 0 for a shard
  std::int64_t budget = 0;      ///< largest K of a group over all ranks; relu: entries expected in total
  Scalar product = Scalar::bf16;
  std::int64_t tile_tokens = 0;    ///< 0: all
  std::int64_t tile_features = 0;  ///< 0: all; else rounded up to a multiple of 8
  bool follows = false;            ///< takes the tiles of another selection: no memory for its own
  ShardPosition position;          ///< default: a single rank
};

/// Why a selection is not valid.
struct SelectionFailure {
  enum Kind : std::uint32_t {
    none = 0,
    overflow = 1,   ///< more entries than the list holds: relu, or a producer that did not repeat a tile's bits
    unsettled = 2,  ///< no pass found a threshold that fits: a producer that did not repeat a tile's bits
  };
  std::uint32_t kind = none;
  std::uint32_t group = 0;    ///< the layer, or 0 with one group for all layers
  std::int64_t entries = 0;   ///< entries that passed the last filter of the group
  std::int64_t capacity = 0;  ///< entries that its list holds
  std::int64_t passes = 0;    ///< passes over the tiles
};

}  // namespace weft::kernels::cuda
