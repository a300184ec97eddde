// SPDX-License-Identifier: Apache-2.0
//
// The process grid: ranks arranged along named axes. The last axis varies fastest with the world rank, so that the
// ranks that exchange most (those of the last axis) are neighbours.
//
//   data      each group of ranks has its own contiguous slice of the batch
//   feature   transcoder: each rank holds a contiguous block of the features of every layer; all have the same tokens
//   tensor    language model: each rank holds a contiguous part of every cut matrix; all have the same tokens
//
// Parts may be uneven: part i of n items over p ranks is [i*n/p, (i+1)*n/p).
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/world.hpp"

namespace weft::parallel {

inline constexpr std::string_view kDataAxis = "data";
inline constexpr std::string_view kFeatureAxis = "feature";
inline constexpr std::string_view kTensorAxis = "tensor";

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

/// The items in both; an empty range that begins at or after `a.begin` if there are none.
constexpr Range intersection(Range a, Range b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

/// Part i of n items cut into p contiguous parts, sizes differing by at most one.
constexpr Range part(std::int64_t n, std::int64_t p, std::int64_t i) { return {i * n / p, (i + 1) * n / p}; }
/// The largest of those parts.
constexpr std::int64_t largest_part(std::int64_t n, std::int64_t p) { return (n + p - 1) / p; }

struct Axis {
  std::string name;
  std::int64_t size = 1;
};

/// The sizes of the axes. Needs no communicator, so that a plan for another machine can use it.
class GridShape {
 public:
  GridShape() = default;
  /// `axes`: from the outermost to the innermost.
  GridShape(std::vector<Axis> axes) : axes_(std::move(axes)) {}

  const std::vector<Axis>& axes() const { return axes_; }
  /// Ranks along an axis; 1 if the grid has no axis of that name.
  std::int64_t size(std::string_view axis) const;
  /// All ranks.
  std::int64_t ranks() const;
  /// Coordinate of a world rank along an axis; 0 if the grid has no axis of that name.
  std::int64_t index_of(std::int64_t rank, std::string_view axis) const;

  /// The part of n items that a rank has if they are divided over every axis, the outermost first: the tokens of a
  /// batch whose residual the rank computes.
  Range part_of_rank(std::int64_t n, std::int64_t rank) const;
  /// Size of the largest of those parts.
  std::int64_t largest_part(std::int64_t n) const;

  /// Axis name -> size, for manifests and run records.
  std::map<std::string, std::int64_t> sizes() const;
  /// "2 x 4 (data x feature)"
  std::string text() const;

 private:
  std::vector<Axis> axes_;
};

/// The grid of a transcoder.
inline GridShape data_by_feature(std::int64_t data, std::int64_t feature) {
  return GridShape({{std::string(kDataAxis), data}, {std::string(kFeatureAxis), feature}});
}

/// `data` groups of `inner.size` ranks each; inner.size = 0 means world / data. Throws a collective Error(usage) if
/// their product is not `world`.
GridShape grid_shape(std::int64_t data, Axis inner, std::int64_t world);

class Grid {
 public:
  Grid(const World& world, GridShape shape) : Grid(world.all(), std::move(shape)) {}
  /// A grid of the ranks of a communicator. Collective over `ranks`. The shape has at least one axis.
  Grid(const Communicator& ranks, GridShape shape);

  const Communicator& world() const { return world_; }
  /// The ranks that differ from this one only in their coordinate along this axis. The axis must exist.
  const Communicator& axis(std::string_view name) const;
  /// All ranks, in the order of `world`: the communicator of an axis that contains all of them, if there is one, so
  /// that their GPUs are connected only once.
  const Communicator& all_on_an_axis() const;
  const GridShape& shape() const { return shape_; }
  std::int64_t size(std::string_view axis) const { return shape_.size(axis); }
  /// This rank's coordinate along an axis.
  std::int64_t index(std::string_view axis) const { return shape_.index_of(world_.rank(), axis); }

  /// This rank's part of n items divided over one axis.
  Range part(std::string_view axis, std::int64_t n) const { return parallel::part(n, size(axis), index(axis)); }
  /// This rank's part of n items divided over every axis.
  Range own_part(std::int64_t n) const { return shape_.part_of_rank(n, world_.rank()); }

 private:
  GridShape shape_;
  Communicator world_;  // a duplicate: separates the messages of the step from those of other threads
  std::vector<Communicator> axes_;
};

}  // namespace weft::parallel
