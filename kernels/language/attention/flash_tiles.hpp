// SPDX-License-Identifier: Apache-2.0
//
// Tiles of 16-bit numbers in shared memory and their products on tensor cores, for attention (flash.hpp): the code of
// one thread of a block of kFlashThreads.
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

#include <cstdint>
#include <type_traits>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"

#ifdef __CUDACC__
#define WEFT_FLASH_INLINE __host__ __device__ __forceinline__
#else
#define WEFT_FLASH_INLINE inline
#endif

namespace weft::kernels {

inline constexpr int kFlashWarps = 4;
inline constexpr int kFlashThreads = kFlashWarps * 32;

/// Rows of a matrix of 16-bit numbers; a head starts at a column.
struct FlashMatrix {
  std::uint16_t* data;
  std::int64_t stride;

  WEFT_FLASH_INLINE std::uint16_t* at(std::int64_t row, std::int64_t column) const {
    return data + row * stride + column;
  }
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

/// A: columns [16 n, 16 n + 16) of a tile as rows; k over rows [row, row + 16).
template <int kHead, class Context>
WEFT_FLASH_INLINE void flash_rows_transposed(Context& context, std::uint32_t tile, int row, int n,
                                             std::uint32_t (&a)[4]) {
  const int lane = context.thread % 32;
  context.load_matrices_transposed(a, tile + flash_place<kHead>(row + lane / 16 * 8 + lane % 8, 2 * n + lane / 8 % 2));
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

}  // namespace weft::kernels
