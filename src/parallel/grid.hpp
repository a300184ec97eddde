// SPDX-License-Identifier: Apache-2.0
//
// The process grid: `data` x `feature` ranks. World rank = data_index * feature + feature_index, so that the ranks
// which exchange most (one feature group) are neighbours.
//
//   feature axis  each rank holds a contiguous block of the features of every layer; all see the same tokens
//   data axis     each feature group has its own contiguous slice of the batch
//
// Blocks and slices may be uneven: block i of n items over p parts is [i*n/p, (i+1)*n/p).
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel/world.hpp"

namespace weft::parallel {

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

/// What both have; empty, somewhere in `a` or behind it, when they have nothing.
constexpr Range intersection(Range a, Range b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

/// Part i of n items cut into p contiguous parts, sizes differing by at most one.
constexpr Range part(std::int64_t n, std::int64_t p, std::int64_t i) { return {i * n / p, (i + 1) * n / p}; }
/// The largest of those parts.
constexpr std::int64_t largest_part(std::int64_t n, std::int64_t p) { return (n + p - 1) / p; }

/// Sizes alone: what a plan for another machine needs.
struct GridShape {
  std::int64_t data = 1;
  std::int64_t feature = 1;
};

/// feature = 0 takes all ranks that data leaves. Throws a collective Error(usage) when data x feature is not `world`.
GridShape grid_shape(std::int64_t data, std::int64_t feature, std::int64_t world);

class Grid {
 public:
  Grid(const World& world, GridShape shape) : Grid(world.all(), shape) {}
  /// A grid of some of the processes. Collective over `ranks`.
  Grid(const Communicator& ranks, GridShape shape);

  const Communicator& world() const { return world_; }
  const Communicator& feature_axis() const { return feature_axis_; }  ///< same tokens, other features
  const Communicator& data_axis() const { return data_axis_; }        ///< same features, other tokens
  /// All ranks, in the order of `world`: an axis where it holds them all, so that their GPUs are joined once.
  const Communicator& all_on_an_axis() const {
    return shape_.data == 1 ? feature_axis_ : shape_.feature == 1 ? data_axis_ : world_;
  }
  GridShape shape() const { return shape_; }
  std::int64_t data_index() const { return data_axis_.rank(); }
  std::int64_t feature_index() const { return feature_axis_.rank(); }

  /// This rank's features of n per layer.
  Range features(std::int64_t n_features) const { return part(n_features, shape_.feature, feature_index()); }
  /// Tokens that this rank's feature group works on, of a batch of n.
  Range group_tokens(std::int64_t n_tokens) const { return part(n_tokens, shape_.data, data_index()); }
  /// Tokens whose residual this rank forms and whose rows it receives: a slice of its group's tokens.
  Range own_tokens(std::int64_t n_tokens) const { return own_tokens_of(n_tokens, data_index(), feature_index()); }
  Range own_tokens_of(std::int64_t n_tokens, std::int64_t data_index, std::int64_t feature_index) const {
    const Range group = part(n_tokens, shape_.data, data_index);
    const Range slice = part(group.size(), shape_.feature, feature_index);
    return {group.begin + slice.begin, group.begin + slice.end};
  }

 private:
  GridShape shape_;
  Communicator world_;  // a duplicate: messages of the step do not meet others
  Communicator feature_axis_;
  Communicator data_axis_;
};

}  // namespace weft::parallel
