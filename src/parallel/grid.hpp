// SPDX-License-Identifier: Apache-2.0
//
// The process grid: ranks arranged along named axes. The last axis varies fastest with the world rank, so that the
// ranks which exchange most (those of the last axis) are neighbours.
//
//   data      each group of ranks has its own contiguous slice of the batch
//   feature   transcoder: each rank holds a contiguous block of the features of every layer; all see the same tokens
//   tensor    language model: each rank holds a contiguous part of every cut matrix; all see the same tokens
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

/// The items of both; where there are none, an empty range at or after the begin of `a`.
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

/// Sizes alone: what a plan for another machine needs.
class GridShape {
 public:
  GridShape() = default;
  /// From the outermost to the innermost axis.
  GridShape(std::vector<Axis> axes) : axes_(std::move(axes)) {}

  const std::vector<Axis>& axes() const { return axes_; }
  /// Ranks along an axis; 1 for an axis that the grid does not have.
  std::int64_t size(std::string_view axis) const;
  /// All ranks.
  std::int64_t ranks() const;
  /// Coordinate of a world rank along an axis; 0 for an axis that the grid does not have.
  std::int64_t index_of(std::int64_t rank, std::string_view axis) const;

  /// The part of n items that a rank has when they are cut over every axis, the outermost first: the tokens of a batch
  /// whose residual the rank forms and whose rows it reads.
  Range part_of_rank(std::int64_t n, std::int64_t rank) const;
  /// Size of the largest of those parts.
  std::int64_t largest_part(std::int64_t n) const;

  /// Axis name -> size, for records.
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

/// `data` groups of `inner.size` ranks; inner.size = 0 takes all ranks that data leaves. Throws a collective
/// Error(usage) when their product is not `world`.
GridShape grid_shape(std::int64_t data, Axis inner, std::int64_t world);

class Grid {
 public:
  Grid(const World& world, GridShape shape) : Grid(world.all(), std::move(shape)) {}
  /// A grid of some of the processes. Collective over `ranks`. The shape has at least one axis.
  Grid(const Communicator& ranks, GridShape shape);

  const Communicator& world() const { return world_; }
  /// The ranks that differ from this one only in their coordinate along this axis. The axis must exist.
  const Communicator& axis(std::string_view name) const;
  /// All ranks, in the order of `world`: the communicator of an axis that has them all, so that their GPUs are
  /// connected once.
  const Communicator& all_on_an_axis() const;
  const GridShape& shape() const { return shape_; }
  std::int64_t size(std::string_view axis) const { return shape_.size(axis); }
  /// This rank's coordinate along an axis.
  std::int64_t index(std::string_view axis) const { return shape_.index_of(world_.rank(), axis); }

  /// This rank's part of n items cut over one axis.
  Range part(std::string_view axis, std::int64_t n) const { return parallel::part(n, size(axis), index(axis)); }
  /// This rank's part of n items cut over every axis.
  Range own_part(std::int64_t n) const { return shape_.part_of_rank(n, world_.rank()); }

 private:
  GridShape shape_;
  Communicator world_;  // a duplicate: separates the messages of the step from all others
  std::vector<Communicator> axes_;
};

}  // namespace weft::parallel
