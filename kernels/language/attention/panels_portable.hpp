// SPDX-License-Identifier: Apache-2.0
//
// What portable attention is made of (attention_portable.cpp): blocks of rows as panels in scratch, tiles of rows of
// the other side, their products, and what a mask hides of them. Only attention_portable.cpp includes this.
#pragma once

#include "kernels/language/attention/attend_row.hpp"
#include "kernels/language/attention/mask.hpp"
#include "kernels/panel_product.hpp"

namespace weft::kernels::portable::panels {

// On a GPU scratch stays below 48 KiB with heads of kLargestHead.
constexpr int kGroups = kLanes == 8 ? 1 : 4;
constexpr int kTileRows = kKeyTile;
constexpr int kBlockRows = kLanes * kGroups;
static_assert(kKeyBlock % kBlockRows == 0 && kKeyBlock % kTileRows == 0 && kTileRows % kMicroRows == 0);

KOKKOS_FORCEINLINE_FUNCTION int least(int a, int b) { return a < b ? a : b; }
KOKKOS_FORCEINLINE_FUNCTION int most(int a, int b) { return a > b ? a : b; }

/// body(m, lane) for all elements of a panel.
template <class Body>
KOKKOS_FORCEINLINE_FUNCTION void for_panel(const Team& team, int n_rows, const Body& body) {
#ifdef KOKKOS_ENABLE_CUDA
  for_columns(team, n_rows * kLanes, [&](int e) { body(e / kLanes, e % kLanes); });
#else
  static_cast<void>(team);
  for (int m = 0; m < n_rows; ++m)
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) body(m, lane);
#endif
}

/// Applies a step to the value of every lane: value[lane] = step(value[lane], m, lane) for m = 0, 1, ...
template <class Step>
KOKKOS_FORCEINLINE_FUNCTION void for_lanes(const Team& team, int n_rows, float* value, const Step& step) {
#ifdef KOKKOS_ENABLE_CUDA
  for_columns(team, kLanes, [&](int lane) {
    for (int m = 0; m < n_rows; ++m) value[lane] = step(value[lane], m, lane);
  });
#else
  static_cast<void>(team);
  float now[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) now[lane] = value[lane];
  for (int m = 0; m < n_rows; ++m)
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) now[lane] = step(now[lane], m, lane);
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = now[lane];
#endif
}

/// A block of one head of one sequence. Rows are counted within the sequence.
struct Block {
  AttentionMask mask;
  std::int64_t first_row;  ///< of the sequence, in the matrices
  std::int64_t sequence, head;
  int length;
  int begin;  ///< first row of the block

  KOKKOS_FORCEINLINE_FUNCTION int end() const { return least(begin + kBlockRows, length); }
  KOKKOS_FORCEINLINE_FUNCTION int row(int group, int lane) const { return begin + group * kLanes + lane; }
  KOKKOS_FORCEINLINE_FUNCTION int groups() const { return (end() - begin + kLanes - 1) / kLanes; }
};

KOKKOS_FORCEINLINE_FUNCTION std::int64_t blocks_of(const Attention& shape) {
  return (shape.length + kBlockRows - 1) / kBlockRows;
}

/// The block of a team: blocks of a head follow each other. The block with the most work comes first.
KOKKOS_FORCEINLINE_FUNCTION Block block_of(const Attention& shape, std::int64_t heads, std::int64_t task,
                                           bool queries) {
  const std::int64_t blocks = blocks_of(shape), place = task % blocks, sequence = task / blocks / heads;
  const std::int64_t block = queries ? blocks - 1 - place : place;
  return {mask_of(shape, sequence), sequence * shape.length,        sequence,
          task / blocks % heads,    static_cast<int>(shape.length), static_cast<int>(block) * kBlockRows};
}

/// panels[group][c][lane] = factor * matrix(row, column + c) for the rows of the block; 0 beyond the sequence.
KOKKOS_FORCEINLINE_FUNCTION void load_panels(const Team& team, const Block& block, const AnyMatrix& matrix,
                                             std::int64_t column, int n_columns, float factor, float* buffer,
                                             float* panels) {
  for (int m = 0; m < kBlockRows; ++m) {
    float* to = panels + m / kLanes * n_columns * kLanes + m % kLanes;
    if (block.begin + m < block.length) {
      const float* from = row_chunk(team, matrix, block.first_row + block.begin + m, column, n_columns, buffer);
      for_columns(team, n_columns, [&](int c) { to[c * kLanes] = factor * from[c]; });
    } else {
      for_columns(team, n_columns, [&](int c) { to[c * kLanes] = 0.0f; });
    }
  }
}

/// matrix(row, column + c) = factor(m) * panels[group][c][lane].
template <class RowFactor>
KOKKOS_FORCEINLINE_FUNCTION void store_panels(const Team& team, const Block& block, const float* panels,
                                              const RowFactor& factor, const AnyMatrix& matrix, std::int64_t column,
                                              int n_columns) {
  for (int m = 0; m < block.end() - block.begin; ++m) {
    const float* from = panels + m / kLanes * n_columns * kLanes + m % kLanes;
    const float by = factor(m);
    store_chunk(team, matrix, block.first_row + block.begin + m, column, n_columns,
                [&](int c) { return by * from[c * kLanes]; });
  }
}

/// tile[m][c] = factor * matrix(row + m, column + c) for m < count; 0 up to a multiple of kMicroRows.
KOKKOS_FORCEINLINE_FUNCTION void load_tile(const Team& team, const AnyMatrix& matrix, std::int64_t row, int count,
                                           std::int64_t column, int n_columns, float factor, float* buffer,
                                           float* tile) {
  for (int m = 0; m < count; ++m) {
    const float* from = row_chunk(team, matrix, row + m, column, n_columns, buffer);
    float* to = tile + m * n_columns;
    for_columns(team, n_columns, [&](int c) { to[c] = factor * from[c]; });
  }
  for (int m = count; m % kMicroRows != 0; ++m)
    for_columns(team, n_columns, [&](int c) { tile[m * n_columns + c] = 0.0f; });
}

/// Rows [begin, end) of a tile that have a score with some lane of a group; both multiples of kMicroRows.
struct Live {
  int begin, end;
  bool masked;  ///< some row has no score with some lane
};

/// Mask of a group of lanes, with queries as lanes and keys as rows.
struct LaneMask {
  int first, last;                 ///< row of the first and of the last lane inside the sequence
  int lower[kLanes], row[kLanes];  ///< each lane reads the keys [lower, row]
  int least_lower, most_lower;

  KOKKOS_FORCEINLINE_FUNCTION LaneMask(const Block& block, int group)
      : first(block.row(group, 0)), last(least(first + kLanes, block.length) - 1) {
    for (int lane = 0; lane < kLanes; ++lane) {
      row[lane] = least(first + lane, last);
      lower[lane] = block.mask.lower(row[lane]);
    }
    least_lower = most_lower = lower[0];
    for (int lane = 1; lane < kLanes; ++lane) {
      least_lower = least(least_lower, lower[lane]);
      most_lower = most(most_lower, lower[lane]);
    }
  }
  KOKKOS_FORCEINLINE_FUNCTION bool reads(int key, int lane) const { return key >= lower[lane] && key <= row[lane]; }

  KOKKOS_FORCEINLINE_FUNCTION Live live(int tile, int count) const {
    Live rows;
    rows.begin = most(least_lower - tile, 0) / kMicroRows * kMicroRows;
    rows.end = (least(last + 1 - tile, count) + kMicroRows - 1) / kMicroRows * kMicroRows;
    rows.masked = tile + rows.begin < most_lower || tile + rows.end - 1 > first;
    return rows;
  }
};

/// Keys as lanes, queries as rows: the rows of a tile.
struct RowMask {
  int tile, count;
  int lower[kTileRows];  ///< row m reads the keys [lower[m], tile + m]
  int least_lower;

  KOKKOS_FORCEINLINE_FUNCTION RowMask(const Block& block, int tile_, int count_) : tile(tile_), count(count_) {
    least_lower = block.length;
    for (int m = 0; m < count; ++m) {
      lower[m] = block.mask.lower(tile + m);
      least_lower = least(least_lower, lower[m]);
    }
  }
  KOKKOS_FORCEINLINE_FUNCTION bool read_by(int key, int m) const {
    return m < count && key >= lower[m] && key <= tile + m;
  }

  /// Live rows of the group whose lanes are the keys [first, last].
  KOKKOS_FORCEINLINE_FUNCTION Live live(int first, int last) const {
    Live rows;
    rows.begin = most(first - tile, 0) / kMicroRows * kMicroRows;
    int end = count;
    while (end > rows.begin && lower[end - 1] > last) --end;
    rows.end = (end + kMicroRows - 1) / kMicroRows * kMicroRows;
    rows.masked = tile + rows.begin < last || rows.end > count || last - first + 1 < kLanes;
    for (int m = rows.begin; m < least(rows.end, count); ++m) rows.masked = rows.masked || lower[m] > first;
    return rows;
  }
};

/// Start of the tile with the first key that a block of queries reads.
KOKKOS_FORCEINLINE_FUNCTION int first_tile(const Block& block) {
  int lower = block.begin;
  for (int row = block.begin; row < block.end(); ++row) lower = least(lower, block.mask.lower(row));
  return lower / kTileRows * kTileRows;
}

/// Last query whose window reaches a block of keys.
KOKKOS_FORCEINLINE_FUNCTION int last_reader(const Block& block) {
  const int window = block.mask.window;
  return window > 0 ? least(block.end() - 1 + window - 1, block.length - 1) : block.length - 1;
}

}  // namespace weft::kernels::portable::panels
