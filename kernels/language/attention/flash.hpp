// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores (FlashAttention-2, Dao 2023), bf16 or fp16 with fp32 sums: the code of one thread of a
// block of kFlashThreads. Everything that only a GPU can do (matrix instructions, copies to shared memory, shuffles
// within a warp) is behind `Context` (flash_tiles.hpp): attention_cuda.cu has the one for a GPU,
// tests/kernels/language/emulated_block.hpp one that runs a block on the host, so that the same source is tested
// without a GPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/language/attention/flash_tiles.hpp"
#include "kernels/language/attention/mask.hpp"
#include "kernels/language/exponential.hpp"

namespace weft::kernels {

/// Row tiles (16 rows each) per warp, and rows of the streamed side: the most that the registers hold.
template <int kHead>
struct FlashSizes {
  static constexpr int forward_row_tiles = 2, forward_tile = kHead <= 64 ? 64 : 32;
  static constexpr int queries_row_tiles = kHead <= 64 ? 2 : 1, queries_tile = 32;
  static constexpr int keys_row_tiles = 1, keys_tile = kHead <= 64 ? 64 : 32;
};

struct FlashArguments {
  Attention shape;
  FlashMatrix queries, keys, values, out, out_gradient, dq, dk, dv;
  float* new_log_sum;    ///< of the forward pass: [sequences, heads, length]
  const float* log_sum;  ///< of the backward pass
  float* delta;          ///< out . out_gradient of each row, likewise
};

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

/// Forms out and log_sum of a block of 64 kRowTiles queries; each warp has 16 kRowTiles of them. Keys and values are
/// streamed in
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

/// Forms dq and delta of a block of 64 kRowTiles queries; keys and values are streamed.
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

/// Forms dk and dv of a block of 64 kRowTiles keys; the queries that read them are streamed, head after head of those
/// that share the keys. Scores are formed transposed, so that keys are the rows of all products.
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
