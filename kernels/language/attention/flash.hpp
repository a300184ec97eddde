// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores (FlashAttention-2, Dao 2023), bf16 or fp16 with fp32 sums: the code of one thread of a
// block of kFlashThreads. Everything that only a GPU can do (matrix instructions, copies to shared memory, exchange
// within a warp) is behind `Context`: attention_cuda.cu has the one for a GPU,
// tests/kernels/language/emulated_block.hpp one that runs a block on the host, so that the same source is tested
// without a GPU.
//
// A Context has: Number (bf16 or half); thread; shared (bytes); sync(), sync_warp(); copy16, copy4 (asynchronous,
// `valid` or zeros), commit(), wait<n>(): all but the last n committed groups of copies have arrived; load_matrices,
// load_matrices_transposed (ldmatrix.x4); multiply (mma.m16n8k16); shuffle_xor; exp2.
//
// Fragments of a warp, with quad = lane / 4 and pair = 2 (lane % 4), as PTX defines them for m16n8k16:
//
//   A [16 rows, 16 k]     a[0], a[1]: rows quad, quad + 8 at k = pair, pair + 1;  a[2], a[3]: the same at k + 8
//   B [16 k, 8 columns]   b[0], b[1]: k = pair, pair + 1 (+ 8) of column quad
//   C [16 rows, 8 cols]   c[0], c[1]: row quad, columns pair, pair + 1;           c[2], c[3]: row quad + 8
//
// Two neighbouring C are, rounded to Number, the A of a product over their 16 columns: probabilities never leave the
// registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/language/attention/mask.hpp"
#include "kernels/language/exponential.hpp"

#ifdef __CUDACC__
#define WEFT_FLASH_INLINE __host__ __device__ __forceinline__
#else
#define WEFT_FLASH_INLINE inline
#endif

namespace weft::kernels {

inline constexpr int kFlashWarps = 4;
inline constexpr int kFlashThreads = kFlashWarps * 32;

/// Row tiles (16 rows each) per warp, and rows of the side that passes by: the most that the registers hold.
template <int kHead>
struct FlashSizes {
  static constexpr int forward_row_tiles = 2, forward_tile = kHead <= 64 ? 64 : 32;
  static constexpr int queries_row_tiles = kHead <= 64 ? 2 : 1, queries_tile = 32;
  static constexpr int keys_row_tiles = 1, keys_tile = kHead <= 64 ? 64 : 32;
};

/// Rows of a matrix of 16-bit numbers; a head starts at a column.
struct FlashMatrix {
  std::uint16_t* data;
  std::int64_t stride;

  WEFT_FLASH_INLINE std::uint16_t* at(std::int64_t row, std::int64_t column) const {
    return data + row * stride + column;
  }
};

struct FlashArguments {
  Attention shape;
  FlashMatrix queries, keys, values, out, out_gradient, dq, dk, dv;
  float* new_log_sum;    ///< of the forward pass: [sequences, heads, length]
  const float* log_sum;  ///< of the backward pass
  float* delta;          ///< out . out_gradient of each row, likewise
};

struct alignas(16) FlashWord {
  std::uint32_t pair[4];
};

WEFT_FLASH_INLINE int flash_least(int a, int b) { return a < b ? a : b; }
WEFT_FLASH_INLINE int flash_most(int a, int b) { return a > b ? a : b; }

/// Two values rounded to Number, the first in the low half.
template <class Number>
WEFT_FLASH_INLINE std::uint32_t flash_pack(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  std::uint32_t pair;
  if constexpr (std::is_same_v<Number, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return from_float<Number>(low).bits | static_cast<std::uint32_t>(from_float<Number>(high).bits) << 16;
#endif
}
template <class Number>
WEFT_FLASH_INLINE float flash_low(std::uint32_t pair) {
  return Number{static_cast<std::uint16_t>(pair & 0xffffu)};
}
template <class Number>
WEFT_FLASH_INLINE float flash_high(std::uint32_t pair) {
  return Number{static_cast<std::uint16_t>(pair >> 16)};
}

/// Byte of chunk `chunk` (eight columns, 16 bytes) of row `row` in a tile [rows, kHead]. The chunks of a row are
/// permuted so that the same chunk of eight successive rows lies in different banks.
template <int kHead>
WEFT_FLASH_INLINE std::uint32_t flash_place(int row, int chunk) {
  constexpr int kChunks = kHead / 8;
  const int swizzled = kChunks >= 8 ? chunk ^ (row & 7) : chunk ^ (row / (8 / kChunks) & (kChunks - 1));
  return static_cast<std::uint32_t>((row * kChunks + swizzled) * 16);
}

/// Requests kRows rows of a head as a tile at byte `to`; rows from `count` on are 0.
template <int kHead, int kRows, class Context>
WEFT_FLASH_INLINE void flash_load(Context& context, std::uint32_t to, const FlashMatrix& matrix, std::int64_t row,
                                  int count, std::int64_t column) {
  constexpr int kChunks = kHead / 8;
  static_assert(kRows * kChunks % kFlashThreads == 0);
#pragma unroll
  for (int i = 0; i < kRows * kChunks / kFlashThreads; ++i) {
    const int index = i * kFlashThreads + context.thread, m = index / kChunks, chunk = index % kChunks;
    const bool valid = m < count;
    context.copy16(to + flash_place<kHead>(m, chunk), matrix.at(row + (valid ? m : 0), column + chunk * 8), valid);
  }
}

/// A: rows [row, row + 16), columns [16 k, 16 k + 16) of a tile.
template <int kHead, class Context>
WEFT_FLASH_INLINE void flash_rows(Context& context, std::uint32_t tile, int row, int k, std::uint32_t (&a)[4]) {
  const int lane = context.thread % 32;
  context.load_matrices(a, tile + flash_place<kHead>(row + lane % 16, 2 * k + lane / 16));
}

/// B of two products with rows of a tile as columns: b[0], b[1] for rows [row, row + 8), b[2], b[3] for the next eight;
/// k over columns [16 k, 16 k + 16).
template <int kHead, class Context>
WEFT_FLASH_INLINE void flash_columns(Context& context, std::uint32_t tile, int row, int k, std::uint32_t (&b)[4]) {
  const int lane = context.thread % 32;
  context.load_matrices(b, tile + flash_place<kHead>(row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
}

/// B of two products with columns of a tile as columns: b[0], b[1] for columns [16 n, 16 n + 8), b[2], b[3] for the
/// next eight; k over rows [row, row + 16).
template <int kHead, class Context>
WEFT_FLASH_INLINE void flash_columns_transposed(Context& context, std::uint32_t tile, int row, int n,
                                                std::uint32_t (&b)[4]) {
  const int lane = context.thread % 32;
  context.load_matrices_transposed(b, tile + flash_place<kHead>(row + lane % 16, 2 * n + lane / 16));
}

/// c[r] += rows [row + 16 r, …) of tile `a` times the rows of tile `b`, transposed.
template <int kHead, int kRowTiles, int kColumnTiles, class Context>
WEFT_FLASH_INLINE void flash_scores(Context& context, std::uint32_t a, int row, std::uint32_t b,
                                    float (&c)[kRowTiles][kColumnTiles][4]) {
  // More unrolling would keep more addresses in registers than there are.
#pragma unroll 2
  for (int k = 0; k < kHead / 16; ++k) {
    std::uint32_t rows[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) flash_rows<kHead>(context, a, row + 16 * r, k, rows[r]);
#pragma unroll
    for (int n = 0; n < kColumnTiles / 2; ++n) {
      std::uint32_t columns[4];
      flash_columns<kHead>(context, b, 16 * n, k, columns);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        context.multiply(c[r][2 * n], rows[r], columns[0], columns[1]);
        context.multiply(c[r][2 * n + 1], rows[r], columns[2], columns[3]);
      }
    }
  }
}

/// c[r] += p[r], rounded to Context::Number, times tile `b`.
template <int kHead, int kRowTiles, int kInnerTiles, class Context>
WEFT_FLASH_INLINE void flash_sums(Context& context, const float (&p)[kRowTiles][kInnerTiles][4], std::uint32_t b,
                                  float (&c)[kRowTiles][kHead / 8][4]) {
#pragma unroll
  for (int k = 0; k < kInnerTiles / 2; ++k) {
    std::uint32_t rows[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[r][i] = flash_pack<typename Context::Number>(p[r][2 * k + i / 2][2 * (i % 2)],
                                                          p[r][2 * k + i / 2][2 * (i % 2) + 1]);
#pragma unroll
    for (int n = 0; n < kHead / 16; ++n) {
      std::uint32_t columns[4];
      flash_columns_transposed<kHead>(context, b, 16 * k, n, columns);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        context.multiply(c[r][2 * n], rows[r], columns[0], columns[1]);
        context.multiply(c[r][2 * n + 1], rows[r], columns[2], columns[3]);
      }
    }
  }
}

/// Writes c, times factor(r, half) for its rows, to rows [first + row, …) of a head through the tile at `stage`, whose
/// rows [row, row + 16 kRowTiles) no other warp uses. Rows from `count` on are not written.
template <int kHead, int kRowTiles, class Context, class Factor>
WEFT_FLASH_INLINE void flash_store(Context& context, const float (&c)[kRowTiles][kHead / 8][4], const Factor& factor,
                                   std::uint32_t stage, int row, const FlashMatrix& matrix, std::int64_t first,
                                   int count, std::int64_t column) {
  constexpr int kChunks = kHead / 8;
  const int lane = context.thread % 32;
  context.sync_warp();  // all lanes have read what was there
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float by = factor(r, half);
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        const std::uint32_t to = stage + flash_place<kHead>(row + 16 * r + 8 * half + lane / 4, n) + lane % 4 * 4;
        *reinterpret_cast<std::uint32_t*>(context.shared + to) =
            flash_pack<typename Context::Number>(by * c[r][n][2 * half], by * c[r][n][2 * half + 1]);
      }
    }
  context.sync_warp();
#pragma unroll
  for (int i = 0; i < 16 * kRowTiles * kChunks / 32; ++i) {
    const int m = row + (i * 32 + lane) / kChunks, chunk = lane % kChunks;
    const FlashWord word = *reinterpret_cast<const FlashWord*>(context.shared + stage + flash_place<kHead>(m, chunk));
    if (m < count) *reinterpret_cast<FlashWord*>(matrix.at(first + m, column + chunk * 8)) = word;
  }
}

/// Smallest and largest first key of the rows [begin, end), at least one. The same in all lanes.
struct FlashLower {
  int least, most;

  template <class Context>
  WEFT_FLASH_INLINE FlashLower(Context& context, const AttentionMask& mask, int begin, int end) {
    least = most = mask.lower(end - 1);
    for (int row = begin + context.thread % 32; row < end; row += 32) {
      const int lower = mask.lower(row);
      least = flash_least(least, lower);
      most = flash_most(most, lower);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      least = flash_least(least, context.shuffle_xor(least, offset));
      most = flash_most(most, context.shuffle_xor(most, offset));
    }
  }
};

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

/// From products q . k to powers of two: p = exp2(factor * s - …), where s is the product, capped if softcap > 0.
struct FlashScale {
  float factor, inverse, softcap;

  WEFT_FLASH_INLINE explicit FlashScale(const Attention& shape)
      : factor(shape.softcap > 0 ? kLog2E : shape.scale * kLog2E),
        inverse(shape.softcap > 0 ? shape.scale / shape.softcap : 0.0f),
        softcap(shape.softcap) {}
  WEFT_FLASH_INLINE float capped(float product) const { return softcap * hyperbolic_tangent(product * inverse); }
};

/// A block of rows of one head of one sequence; blocks of a head follow each other, that with the most work first.
struct FlashBlock {
  AttentionMask mask;
  std::int64_t first;  ///< row 0 of the sequence in the matrices
  std::int64_t sequence, head;
  int length, begin, end;

  /// First key that a row reads; rows past the end: that of the last row.
  WEFT_FLASH_INLINE int lower(int row) const { return mask.lower(flash_least(row, end - 1)); }

  WEFT_FLASH_INLINE FlashBlock(const Attention& shape, std::int64_t heads, int block_rows, std::int64_t task,
                               bool last_first)
      : length(static_cast<int>(shape.length)) {
    const int blocks = (length + block_rows - 1) / block_rows;
    const int place = static_cast<int>(task % blocks);
    sequence = task / blocks / heads;
    head = task / blocks % heads;
    mask = mask_of(shape, sequence);
    first = sequence * shape.length;
    begin = (last_first ? blocks - 1 - place : place) * block_rows;
    end = flash_least(begin + block_rows, length);
  }
};

template <int kHead, int kRowTiles, int kTile>
constexpr std::int64_t flash_forward_shared() {
  return std::int64_t{kHead} * 2 * (kFlashWarps * 16 * kRowTiles + 4 * kTile);
}

/// out and log_sum of a block of 64 kRowTiles queries; each warp has 16 kRowTiles of them. Keys and values pass by in
/// tiles of kTile rows, double-buffered.
template <int kHead, int kRowTiles, int kTile, class Context>
WEFT_FLASH_INLINE void flash_forward(Context& context, const FlashArguments& a, std::int64_t task) {
  constexpr int kRows = kFlashWarps * 16 * kRowTiles;
  constexpr std::uint32_t kTileBytes = kTile * kHead * 2, kQueryBytes = kRows * kHead * 2;
  constexpr int kColumnTiles = kTile / 8;
  const FlashBlock block(a.shape, a.shape.heads, kRows, task, true);
  const FlashScale scale(a.shape);
  const std::int64_t column = block.head * kHead;
  const std::int64_t key_column = block.head / (a.shape.heads / a.shape.kv_heads) * kHead;
  const int lane = context.thread % 32, warp = context.thread / 32;
  const int own = warp * 16 * kRowTiles;  // first row of this warp in the block
  const auto stage = [](int step) { return kQueryBytes + static_cast<std::uint32_t>(step % 2) * 2 * kTileBytes; };

  // Rows of this thread: quad and quad + 8 of each row tile. Those past the end are not stored.
  const int first_row = block.begin + own + lane / 4;
  const int warp_first = flash_least(block.begin + own, block.end - 1);
  const int warp_last = flash_least(block.begin + own + 16 * kRowTiles, block.end) - 1;
  const FlashLower warp_lower(context, block.mask, warp_first, warp_last + 1);
  const int first_tile = FlashLower(context, block.mask, block.begin, block.end).least / kTile;
  const int end_tile = (block.end + kTile - 1) / kTile;
  const KeptBlocks kept = kept_of(a.shape, block.sequence, block.head);
  // The next tile from `tile` on that rows of the block read.
  const auto next = [&](int tile) {
    if (kept.kept != nullptr)
      while (tile < end_tile && !kept(block.begin, tile * kTile) && !kept(block.end - 1, tile * kTile)) ++tile;
    return tile;
  };

  const auto load = [&](int tile, int step) {
    const int key = tile * kTile, count = block.end - key;
    flash_load<kHead, kTile>(context, stage(step), a.keys, block.first + key, count, key_column);
    flash_load<kHead, kTile>(context, stage(step) + kTileBytes, a.values, block.first + key, count, key_column);
  };
  flash_load<kHead, kRows>(context, 0, a.queries, block.first + block.begin, block.end - block.begin, column);
  int tile = next(first_tile);
  load(tile, 0);
  context.commit();

  float sums[kRowTiles][kHead / 8][4] = {};
  float largest[kRowTiles][2], total[kRowTiles][2];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[r][half] = -INFINITY;
      total[r][half] = 0.0f;
    }

  for (int step = 0, ahead; tile < end_tile; ++step, tile = ahead) {
    ahead = next(tile + 1);
    if (ahead < end_tile) load(ahead, step + 1);
    context.commit();
    context.template wait<1>();
    context.sync();
    const int key = tile * kTile;
    if (key <= warp_last && key + kTile > warp_lower.least && kept(warp_first, key)) {
      float s[kRowTiles][kColumnTiles][4] = {};
      flash_scores<kHead>(context, 0, own, stage(step), s);
      if (scale.softcap > 0)
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[r][n][i] = scale.capped(s[r][n][i]);
      if (key < warp_lower.most || key + kTile - 1 > warp_first)
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = first_row + 16 * r + 8 * half, lower = block.lower(row);
#pragma unroll
            for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                const int at = key + 8 * n + lane % 4 * 2 + j;
                if (at < lower || at > row) s[r][n][2 * half + j] = -INFINITY;
              }
          }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float next = largest[r][half];
#pragma unroll
          for (int n = 0; n < kColumnTiles; ++n) next = fmaxf(next, fmaxf(s[r][n][2 * half], s[r][n][2 * half + 1]));
          next = fmaxf(next, context.shuffle_xor(next, 1));
          next = fmaxf(next, context.shuffle_xor(next, 2));
          const float reference = next == -INFINITY ? 0.0f : next * scale.factor;  // no key read yet
          const float correction = context.exp2(largest[r][half] * scale.factor - reference);
          largest[r][half] = next;
          float sum = 0.0f;  // of this thread's columns; the quad is summed at the end
#pragma unroll
          for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              s[r][n][i] = context.exp2(fmaf(s[r][n][i], scale.factor, -reference));
              sum += s[r][n][i];
            }
          total[r][half] = total[r][half] * correction + sum;
#pragma unroll
          for (int n = 0; n < kHead / 8; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) sums[r][n][i] *= correction;
        }
      flash_sums<kHead>(context, s, stage(step) + kTileBytes, sums);
    }
    context.sync();  // the other buffer may be filled
  }

#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = total[r][half];
      sum += context.shuffle_xor(sum, 1);
      sum += context.shuffle_xor(sum, 2);
      const int at = first_row + 16 * r + 8 * half;
      if (lane % 4 == 0 && at < block.end)
        a.new_log_sum[(block.sequence * a.shape.heads + block.head) * block.length + at] =
            largest[r][half] * scale.factor * kLn2 + logf(sum);
    }
  flash_store<kHead>(
      context, sums, [&](int r, int half) { return 1.0f / total[r][half]; }, 0, own, a.out, block.first + block.begin,
      block.end - block.begin, column);
}

/// One element: s becomes the probability and dp the gradient of the product q . k (without `scale`), from the product
/// s and the gradient dp of the probability. bound = log2(e) log_sum.
template <class Context>
WEFT_FLASH_INLINE void flash_slope(Context& context, const FlashScale& scale, float& s, float& dp, float bound,
                                   float delta) {
  float slope = 1.0f;
  if (scale.softcap > 0) {
    s = scale.capped(s);
    const float part = s / scale.softcap;
    slope = 1.0f - part * part;
  }
  s = context.exp2(fmaf(s, scale.factor, -bound));
  dp = s * (dp - delta) * slope;
}

template <int kHead, int kRowTiles, int kTile>
constexpr std::int64_t flash_queries_backward_shared() {
  return std::int64_t{kHead} * 2 * (2 * kFlashWarps * 16 * kRowTiles + 4 * kTile);
}

/// dq and delta of a block of 64 kRowTiles queries; keys and values pass by.
template <int kHead, int kRowTiles, int kTile, class Context>
WEFT_FLASH_INLINE void flash_queries_backward(Context& context, const FlashArguments& a, std::int64_t task) {
  constexpr int kRows = kFlashWarps * 16 * kRowTiles;
  constexpr std::uint32_t kTileBytes = kTile * kHead * 2, kRowBytes = kRows * kHead * 2;
  constexpr int kColumnTiles = kTile / 8;
  const FlashBlock block(a.shape, a.shape.heads, kRows, task, true);
  const FlashScale scale(a.shape);
  const std::int64_t column = block.head * kHead;
  const std::int64_t key_column = block.head / (a.shape.heads / a.shape.kv_heads) * kHead;
  const int lane = context.thread % 32, warp = context.thread / 32;
  const int own = warp * 16 * kRowTiles;
  const auto stage = [](int step) { return 2 * kRowBytes + static_cast<std::uint32_t>(step % 2) * 2 * kTileBytes; };

  const int first_row = block.begin + own + lane / 4;
  const int warp_first = flash_least(block.begin + own, block.end - 1);
  const int warp_last = flash_least(block.begin + own + 16 * kRowTiles, block.end) - 1;
  const FlashLower warp_lower(context, block.mask, warp_first, warp_last + 1);
  const int first_tile = FlashLower(context, block.mask, block.begin, block.end).least / kTile;
  const int end_tile = (block.end + kTile - 1) / kTile;
  const KeptBlocks kept = kept_of(a.shape, block.sequence, block.head);
  // The next tile from `tile` on that rows of the block read.
  const auto next = [&](int tile) {
    if (kept.kept != nullptr)
      while (tile < end_tile && !kept(block.begin, tile * kTile) && !kept(block.end - 1, tile * kTile)) ++tile;
    return tile;
  };
  const auto load = [&](int tile, int step) {
    const int key = tile * kTile, count = block.end - key;
    flash_load<kHead, kTile>(context, stage(step), a.keys, block.first + key, count, key_column);
    flash_load<kHead, kTile>(context, stage(step) + kTileBytes, a.values, block.first + key, count, key_column);
  };
  const int count = block.end - block.begin;
  flash_load<kHead, kRows>(context, 0, a.queries, block.first + block.begin, count, column);
  flash_load<kHead, kRows>(context, kRowBytes, a.out_gradient, block.first + block.begin, count, column);
  int tile = next(first_tile);
  load(tile, 0);
  context.commit();

  float bound[kRowTiles][2], delta[kRowTiles][2];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = first_row + 16 * r + 8 * half, row = flash_least(at, block.end - 1);
      const std::int64_t statistics = (block.sequence * a.shape.heads + block.head) * block.length + row;
      bound[r][half] = a.log_sum[statistics] * kLog2E;
      // The four lanes of a row take every fourth chunk of it.
      float sum = 0.0f;
#pragma unroll
      for (int chunk = 0; chunk < kHead / 32; ++chunk) {
        const std::int64_t c = column + (chunk * 4 + lane % 4) * 8;
        const FlashWord o = *reinterpret_cast<const FlashWord*>(a.out.at(block.first + row, c));
        const FlashWord g = *reinterpret_cast<const FlashWord*>(a.out_gradient.at(block.first + row, c));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          using Number = typename Context::Number;
          sum = fmaf(flash_low<Number>(o.pair[i]), flash_low<Number>(g.pair[i]), sum);
          sum = fmaf(flash_high<Number>(o.pair[i]), flash_high<Number>(g.pair[i]), sum);
        }
      }
      sum += context.shuffle_xor(sum, 1);
      sum += context.shuffle_xor(sum, 2);
      delta[r][half] = sum;
      if (lane % 4 == 0 && at < block.end) a.delta[statistics] = sum;
    }
  float sums[kRowTiles][kHead / 8][4] = {};
  for (int step = 0, ahead; tile < end_tile; ++step, tile = ahead) {
    ahead = next(tile + 1);
    if (ahead < end_tile) load(ahead, step + 1);
    context.commit();
    context.template wait<1>();
    context.sync();
    const int key = tile * kTile;
    if (key <= warp_last && key + kTile > warp_lower.least && kept(warp_first, key)) {
      float s[kRowTiles][kColumnTiles][4] = {}, dp[kRowTiles][kColumnTiles][4] = {};
      flash_scores<kHead>(context, 0, own, stage(step), s);
      flash_scores<kHead>(context, kRowBytes, own, stage(step) + kTileBytes, dp);
      const bool masked = key < warp_lower.most || key + kTile - 1 > warp_first;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + 16 * r + 8 * half, lower = masked ? block.lower(row) : 0;
#pragma unroll
          for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int i = 2 * half + j, at = key + 8 * n + lane % 4 * 2 + j;
              flash_slope(context, scale, s[r][n][i], dp[r][n][i], bound[r][half], delta[r][half]);
              if (masked && (at < lower || at > row)) dp[r][n][i] = 0.0f;
            }
        }
      flash_sums<kHead>(context, dp, stage(step), sums);
    }
    context.sync();
  }
  flash_store<kHead>(
      context, sums, [&](int, int) { return a.shape.scale; }, 0, own, a.dq, block.first + block.begin, count, column);
}

template <int kHead, int kRowTiles, int kTile>
constexpr std::int64_t flash_keys_backward_shared() {
  return std::int64_t{kHead} * 2 * (2 * kFlashWarps * 16 * kRowTiles + 4 * kTile) + 4 * kTile * std::int64_t{4};
}

/// dk and dv of a block of 64 kRowTiles keys; the queries that read them pass by, head after head of those that share
/// the keys. Scores are formed transposed, so that keys are the rows of all products.
template <int kHead, int kRowTiles, int kTile, class Context>
WEFT_FLASH_INLINE void flash_keys_backward(Context& context, const FlashArguments& a, std::int64_t task) {
  constexpr int kRows = kFlashWarps * 16 * kRowTiles;
  constexpr std::uint32_t kTileBytes = kTile * kHead * 2, kRowBytes = kRows * kHead * 2;
  constexpr std::uint32_t kStageBytes = 2 * kTileBytes + 2 * kTile * 4;  // queries, gradients, log_sum, delta
  constexpr int kColumnTiles = kTile / 8;
  static_assert(2 * kTile <= kFlashThreads && kRows == kKeyBlock);
  const FlashBlock block(a.shape, a.shape.kv_heads, kRows, task, false);
  const FlashScale scale(a.shape);
  const std::int64_t key_column = block.head * kHead;
  const int sharing = static_cast<int>(a.shape.heads / a.shape.kv_heads);
  const int lane = context.thread % 32, warp = context.thread / 32;
  const int own = warp * 16 * kRowTiles;
  const auto stage = [](int step) { return 2 * kRowBytes + static_cast<std::uint32_t>(step % 2) * kStageBytes; };

  // Tiles of queries: from the diagonal to the last that reads a key of the block.
  const int first_tile = block.begin / kTile;
  const int window = block.mask.window;
  int end = window > 0 ? flash_least(block.end - 1 + window, block.length) : block.length;
  int tiles = (end + kTile - 1) / kTile - first_tile;
  if (block.mask.first_key != nullptr)
    while (tiles > 1) {
      const int last = (first_tile + tiles - 1) * kTile;
      if (FlashLower(context, block.mask, last, flash_least(last + kTile, block.length)).least < block.end) break;
      --tiles;
    }
  // Items: the tiles of one head after the other.
  const int items = sharing * tiles;
  const auto head_of = [&](int item) { return block.head * sharing + item / tiles; };
  const auto query_of = [&](int item) { return (first_tile + item % tiles) * kTile; };
  // The next item from `item` on that reads the block.
  const auto next = [&](int item) {
    if (a.shape.kept.size > 0)
      while (item < items && !kept_of(a.shape, block.sequence, head_of(item))(query_of(item), block.begin)) ++item;
    return item;
  };
  const auto load = [&](int item, int step) {
    const std::int64_t head = head_of(item);
    const int query = query_of(item), count = block.length - query;
    const std::uint32_t to = stage(step);
    flash_load<kHead, kTile>(context, to, a.queries, block.first + query, count, head * kHead);
    flash_load<kHead, kTile>(context, to + kTileBytes, a.out_gradient, block.first + query, count, head * kHead);
    if (context.thread < 2 * kTile) {
      const int m = context.thread % kTile;
      const float* from = context.thread < kTile ? a.log_sum : a.delta;
      const std::int64_t at = (block.sequence * a.shape.heads + head) * block.length + query;
      const bool valid = m < count;
      context.copy4(to + 2 * kTileBytes + static_cast<std::uint32_t>(context.thread) * 4, from + at + (valid ? m : 0),
                    valid);
    }
  };
  const int count = block.end - block.begin;
  flash_load<kHead, kRows>(context, 0, a.keys, block.first + block.begin, count, key_column);
  flash_load<kHead, kRows>(context, kRowBytes, a.values, block.first + block.begin, count, key_column);
  int item = next(0);
  load(item, 0);
  context.commit();

  const int warp_first = block.begin + own, warp_last = warp_first + 16 * kRowTiles - 1;
  float dk[kRowTiles][kHead / 8][4] = {}, dv[kRowTiles][kHead / 8][4] = {};
  for (int step = 0, ahead; item < items; ++step, item = ahead) {
    ahead = next(item + 1);
    if (ahead < items) load(ahead, step + 1);
    context.commit();
    context.template wait<1>();
    context.sync();
    const int query = query_of(item);
    if (query + kTile > warp_first && (window == 0 || query < warp_last + window)) {
      const std::uint32_t from = stage(step);
      const float* log_sum = reinterpret_cast<const float*>(context.shared + from + 2 * kTileBytes);
      const float* delta = log_sum + kTile;
      float s[kRowTiles][kColumnTiles][4] = {}, dp[kRowTiles][kColumnTiles][4] = {};
      flash_scores<kHead>(context, 0, own, from, s);
      flash_scores<kHead>(context, kRowBytes, own, from + kTileBytes, dp);
      const bool masked = block.mask.first_key != nullptr || query < warp_last || query + kTile > block.length ||
                          block.mask.lower(query + kTile - 1) > warp_first;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int m = 8 * n + lane % 4 * 2 + j;
          const float bound = log_sum[m] * kLog2E;
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int i = j; i < 4; i += 2) flash_slope(context, scale, s[r][n][i], dp[r][n][i], bound, delta[m]);
          if (masked) {
            const int at = query + m;
            const int lower = at < block.length ? block.mask.lower(at) : block.length;
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
              for (int i = j; i < 4; i += 2) {
                const int key = warp_first + 16 * r + i / 2 * 8 + lane / 4;
                if (key < lower || key > at) s[r][n][i] = dp[r][n][i] = 0.0f;
              }
          }
        }
      flash_sums<kHead>(context, s, from + kTileBytes, dv);
      flash_sums<kHead>(context, dp, from, dk);
    }
    context.sync();
  }
  const std::int64_t first = block.first + block.begin;
  flash_store<kHead>(
      context, dk, [&](int, int) { return a.shape.scale; }, 0, own, a.dk, first, count, key_column);
  flash_store<kHead>(
      context, dv, [](int, int) { return 1.0f; }, kRowBytes, own, a.dv, first, count, key_column);
}

}  // namespace weft::kernels

#undef WEFT_FLASH_INLINE
