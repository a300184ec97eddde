// SPDX-License-Identifier: Apache-2.0
//
// Products over the rows of examples on tensor cores, bf16 or fp16 with fp32 sums: the code of one thread of a block of
// kTileThreads, which forms one tile of 128 x 128. No gradient and no Gram matrix of an example is stored.
//
//   direct     tile of G_bᵀ X_b                  -> sum of its squares
//   gram       tiles of X_b X_bᵀ and G_b G_bᵀ    -> sum of their products
//   weighed    sum over b of c_b G_bᵀ X_b        -> c_b in fp32, at the end of each example
//
// As attention (flash.hpp), the code is written for a Context (flash_tiles.hpp): fused_cuda.cu has the one for a GPU,
// tests/kernels/language/emulated_block.hpp one that runs a block on the host.
//
// Rows begin at multiples of 16 bytes, and widths are multiples of 8. Rows and columns beyond the ends are 0.
#pragma once

#include <cstdint>

#include "kernels/language/attention/flash_tiles.hpp"
#include "kernels/privacy/example_sums.hpp"

namespace weft::kernels {

inline constexpr int kTileSide = 128;
inline constexpr int kTileThreads = 256;  ///< 8 warps: 2 along the rows of a tile, 4 along its columns
inline constexpr int kTileStages = 3;     ///< parts of the operands in shared memory: one is read, two arrive
inline constexpr int kTileRows = 32;      ///< rows of a stage where the sum is over rows
inline constexpr int kTileColumns = 64;   ///< columns of a stage where the sum is over columns

/// Bytes of shared memory.
inline constexpr int kRowProductShared = kTileStages * 2 * kTileRows * kTileSide * 2;
inline constexpr int kColumnProductShared = kTileStages * 2 * kTileSide * kTileColumns * 2;

struct TileMatrix {
  const std::uint16_t* data;
  std::int64_t columns, stride;
};

/// Part of a tile that a warp holds: 64 rows, 32 columns, as fragments of 16 x 8 (flash_tiles.hpp).
using WarpTile = float[4][4][4];

/// Place of a warp's part in the tile.
WEFT_FLASH_INLINE int warp_row(int thread) { return thread / 32 / 4 * 64; }
WEFT_FLASH_INLINE int warp_column(int thread) { return thread / 32 % 4 * 32; }

/// Calls body(first, second, row, column) of the tile for every two adjacent columns that this thread has.
template <class Body>
WEFT_FLASH_INLINE void for_pairs(int thread, WarpTile& c, const Body& body) {
  const int row = warp_row(thread) + thread % 32 / 4, column = warp_column(thread) + thread % 4 * 2;
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; i += 2) body(c[r][n][i], c[r][n][i + 1], row + 16 * r + i / 2 * 8, column + 8 * n);
}

/// Requests rows [row, row + kRows) below `end` and columns [column, column + kWidth) as a tile at byte `to`.
template <int kWidth, int kRows, class Context>
WEFT_FLASH_INLINE void load_tile(Context& context, std::uint32_t to, const TileMatrix& matrix, std::int64_t row,
                                 std::int64_t end, std::int64_t column) {
  constexpr int kChunks = kWidth / 8;
  static_assert(kRows * kChunks % kTileThreads == 0);
#pragma unroll
  for (int i = 0; i < kRows * kChunks / kTileThreads; ++i) {
    const int index = i * kTileThreads + context.thread, m = index / kChunks, chunk = index % kChunks;
    const bool valid = row + m < end && column + chunk * 8 < matrix.columns;
    const std::int64_t at = valid ? (row + m) * matrix.stride + column + chunk * 8 : 0;
    context.copy16(to + flash_place<kWidth>(m, chunk), matrix.data + at, valid);
  }
}

/// Runs use(stage) for `steps` parts, which load(step, stage) requests kTileStages - 1 steps before. When it returns,
/// no warp reads shared memory.
template <class Context, class Load, class Use>
WEFT_FLASH_INLINE void pipeline(Context& context, std::int64_t steps, const Load& load, const Use& use) {
  const auto request = [&](std::int64_t step) {
    if (step < steps) load(step, static_cast<int>(step % kTileStages));
    context.commit();
  };
  for (int step = 0; step < kTileStages - 1; ++step) request(step);
  for (std::int64_t step = 0; step < steps; ++step) {
    context.template wait<kTileStages - 2>();
    context.sync();  // this part has arrived for all, and all have read the part before, which is overwritten now
    request(step + kTileStages - 1);
    use(static_cast<int>(step % kTileStages));
  }
  context.template wait<0>();
  context.sync();
}

/// a[r] += products of the fragments of 16 values of the sum.
template <class Context, class Rows, class Columns>
WEFT_FLASH_INLINE void multiply_fragments(Context& context, WarpTile& c, const Rows& rows, const Columns& columns) {
  std::uint32_t a[4][4];
#pragma unroll
  for (int r = 0; r < 4; ++r) rows(r, a[r]);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    std::uint32_t b[4];
    columns(n, b);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      context.multiply(c[r][2 * n], a[r], b[0], b[1]);
      context.multiply(c[r][2 * n + 1], a[r], b[2], b[3]);
    }
  }
}

/// c += G[begin .. end)ᵀ X[begin .. end), outputs from `output` on, inputs from `input` on.
template <class Context>
WEFT_FLASH_INLINE void add_product_over_rows(Context& context, const TileMatrix& g, const TileMatrix& x,
                                             std::int64_t begin, std::int64_t end, std::int64_t output,
                                             std::int64_t input, WarpTile& c) {
  constexpr std::uint32_t kBytes = kTileRows * kTileSide * 2;
  const int lane = context.thread % 32, m = warp_row(context.thread), n = warp_column(context.thread);
  pipeline(
      context, (end - begin + kTileRows - 1) / kTileRows,
      [&](std::int64_t step, int stage) {
        const std::uint32_t to = static_cast<std::uint32_t>(stage) * 2 * kBytes;
        load_tile<kTileSide, kTileRows>(context, to, g, begin + step * kTileRows, end, output);
        load_tile<kTileSide, kTileRows>(context, to + kBytes, x, begin + step * kTileRows, end, input);
      },
      [&](int stage) {
        const std::uint32_t from = static_cast<std::uint32_t>(stage) * 2 * kBytes;
#pragma unroll
        for (int k = 0; k < kTileRows; k += 16)
          multiply_fragments(
              context, c,
              // A is the transpose of a part of the tile: its rows are columns there.
              [&](int r, std::uint32_t(&a)[4]) {
                context.load_matrices_transposed(
                    a, from + flash_place<kTileSide>(k + lane / 16 * 8 + lane % 8, (m + 16 * r) / 8 + lane / 8 % 2));
              },
              [&](int pair, std::uint32_t(&b)[4]) {
                flash_columns_transposed<kTileSide>(context, from + kBytes, k, n / 16 + pair, b);
              });
      });
}

/// c += rows [i, end) times rows [j, end) of the matrix, transposed; 128 of each at most.
template <class Context>
WEFT_FLASH_INLINE void add_product_over_columns(Context& context, const TileMatrix& matrix, std::int64_t i,
                                                std::int64_t j, std::int64_t end, WarpTile& c) {
  constexpr std::uint32_t kBytes = kTileSide * kTileColumns * 2;
  const int m = warp_row(context.thread), n = warp_column(context.thread);
  pipeline(
      context, (matrix.columns + kTileColumns - 1) / kTileColumns,
      [&](std::int64_t step, int stage) {
        const std::uint32_t to = static_cast<std::uint32_t>(stage) * 2 * kBytes;
        load_tile<kTileColumns, kTileSide>(context, to, matrix, i, end, step * kTileColumns);
        load_tile<kTileColumns, kTileSide>(context, to + kBytes, matrix, j, end, step * kTileColumns);
      },
      [&](int stage) {
        const std::uint32_t from = static_cast<std::uint32_t>(stage) * 2 * kBytes;
    // Two tiles of sums leave no registers for the addresses of more.
#pragma unroll 1
        for (int k = 0; k < kTileColumns / 16; ++k)
          multiply_fragments(
              context, c,
              [&](int r, std::uint32_t(&a)[4]) { flash_rows<kTileColumns>(context, from, m + 16 * r, k, a); },
              [&](int pair, std::uint32_t(&b)[4]) {
                flash_columns<kTileColumns>(context, from + kBytes, n + 16 * pair, k, b);
              });
      });
}

/// Sum over the threads in a fixed order, on thread 0. Overwrites the start of shared memory.
template <class Context>
WEFT_FLASH_INLINE double sum_over_block(Context& context, double value) {
  double* const sums = reinterpret_cast<double*>(context.shared);
  sums[context.thread] = value;
  for (int half = kTileThreads / 2; half > 0; half /= 2) {
    context.sync();
    if (context.thread < half) sums[context.thread] += sums[context.thread + half];
  }
  return sums[0];
}

constexpr std::int64_t tiles_of(std::int64_t size) { return (size + kTileSide - 1) / kTileSide; }

// direct -------------------------------------------------------------------------------------------------------------

struct DirectTiles {
  TileMatrix x, g;
  const std::int64_t* offsets;
  std::int64_t least;  ///< examples of at most so many rows are left out: their parts are 0
  double* parts;       ///< [examples, tiles]
};

WEFT_FLASH_INLINE std::int64_t direct_tiles(const TileMatrix& x, const TileMatrix& g) {
  return tiles_of(g.columns) * tiles_of(x.columns);
}

/// Tile `task` % tiles of example `task` / tiles.
template <class Context>
WEFT_FLASH_INLINE void form_direct_tile(Context& context, const DirectTiles& a, std::int64_t task) {
  const std::int64_t tiles = direct_tiles(a.x, a.g), across = tiles_of(a.x.columns);
  const std::int64_t e = task / tiles, output = task % tiles / across * kTileSide,
                     input = task % tiles % across * kTileSide;
  const std::int64_t begin = a.offsets[e], end = a.offsets[e + 1];
  double sum = 0;
  if (end - begin > a.least) {
    WarpTile c = {};
    add_product_over_rows(context, a.g, a.x, begin, end, output, input, c);
    for_pairs(context.thread, c, [&](float first, float second, int, int) {
      sum += static_cast<double>(first) * static_cast<double>(first) +
             static_cast<double>(second) * static_cast<double>(second);
    });
  }
  const double total = sum_over_block(context, sum);
  if (context.thread == 0) a.parts[task] = total;
}

// gram ---------------------------------------------------------------------------------------------------------------

struct GramPairs {
  TileMatrix x, g;
  const std::int64_t* offsets;
  std::int64_t least;  ///< as above
  std::int64_t side;   ///< tiles of the longest example
  double error;        ///< relative, of a product of entries: what is summed is the most that it can be
  double* parts;       ///< [examples, gram_pairs(side)]
};

/// Pairs of tiles (i, j), i <= j.
WEFT_FLASH_INLINE constexpr std::int64_t gram_pairs(std::int64_t side) { return side * (side + 1) / 2; }

template <class Context>
WEFT_FLASH_INLINE void form_gram_pair(Context& context, const GramPairs& a, std::int64_t task) {
  const std::int64_t pairs = gram_pairs(a.side), e = task / pairs, pair = task % pairs;
  std::int64_t j = 0;
  while (gram_pairs(j + 1) <= pair) ++j;
  const std::int64_t i = pair - gram_pairs(j);
  const std::int64_t begin = a.offsets[e], end = a.offsets[e + 1];
  double sum = 0;
  if (end - begin > a.least && j * kTileSide < end - begin) {
    const std::int64_t first = begin + i * kTileSide, second = begin + j * kTileSide;
    WarpTile of_x = {}, of_g = {};
    add_product_over_columns(context, a.x, first, second, end, of_x);
    add_product_over_columns(context, a.g, first, second, end, of_g);
#pragma unroll
    for (int k = 0; k < 64; ++k)
      sum += at_most(
          static_cast<double>(of_x[k / 16][k / 4 % 4][k % 4]) * static_cast<double>(of_g[k / 16][k / 4 % 4][k % 4]),
          a.error);
    if (i != j) sum *= 2;
  }
  const double total = sum_over_block(context, sum);
  if (context.thread == 0) a.parts[task] = total;
}

// weighed ------------------------------------------------------------------------------------------------------------

struct WeighedTiles {
  TileMatrix x, g;
  const std::int64_t* offsets;
  std::int64_t examples;
  const float* factors;
  std::int64_t slices;  ///< of the examples, each with sums of its own
  float* sums;          ///< [slices, out * in]: overwritten
};

/// Tile `task` % tiles of the sums over the examples of slice `task` / tiles. Examples with factor 0 are not read.
template <class Context>
WEFT_FLASH_INLINE void form_weighed_tile(Context& context, const WeighedTiles& a, std::int64_t task) {
  const std::int64_t tiles = direct_tiles(a.x, a.g), across = tiles_of(a.x.columns);
  const std::int64_t slice = task / tiles, output = task % tiles / across * kTileSide,
                     input = task % tiles % across * kTileSide;
  WarpTile total = {};
  for (std::int64_t e = a.examples * slice / a.slices; e < a.examples * (slice + 1) / a.slices; ++e) {
    const float factor = a.factors[e];
    if (factor == 0.0f) continue;
    WarpTile c = {};
    add_product_over_rows(context, a.g, a.x, a.offsets[e], a.offsets[e + 1], output, input, c);
#pragma unroll
    for (int k = 0; k < 64; ++k) total[k / 16][k / 4 % 4][k % 4] += factor * c[k / 16][k / 4 % 4][k % 4];
  }
  for_pairs(context.thread, total, [&](float first, float second, int row, int column) {
    if (output + row >= a.g.columns || input + column >= a.x.columns) return;
    float* to = a.sums + (slice * a.g.columns + output + row) * a.x.columns + input + column;
    to[0] = first, to[1] = second;
  });
}

}  // namespace weft::kernels
