// SPDX-License-Identifier: Apache-2.0
//
// Part of a product of few rows, y = x Wᵀ, on tensor cores: the code of one thread of a block that sums one tile of
// outputs over a range of inputs. The Context is that of attention/flash_tiles.hpp; a test runs this code on the host.
//
// W is the first operand of mma.m16n8k16 (16 outputs), the rows of x are the second (8 rows): one row costs as much as
// eight. Each warp takes 16 outputs, all rows, and every kInnerWarps-th group of 16 inputs of a chunk; the sums of the
// warps are added in their order.
//
// Invariant. The order in which a sum is formed depends on the number of outputs and inputs alone: a row has the same
// bits whatever the other rows are and however many.
#pragma once

#include "kernels/language/attention/flash_tiles.hpp"

namespace weft::kernels {

/// How a block divides its work. kRows: of x, the rest are zeros; kOutputs: of the tile; kTransposed: W is stored as
/// [inputs, outputs].
template <int kRows_, int kOutputs_, bool kTransposed_>
struct FewRowsTile {
  static constexpr int kRows = kRows_, kOutputs = kOutputs_;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kChunk = 64;                       ///< inputs that are loaded together
  static constexpr int kStages = kOutputs == 32 ? 6 : 4;  ///< chunks in flight
  static constexpr int kOutputWarps = kOutputs / 16, kInnerWarps = kWarps / kOutputWarps;
  static constexpr int kRowsBytes = kRows * kChunk * 2, kStageBytes = kRowsBytes + kOutputs * kChunk * 2;
  /// Sums are stored as [row][output]. Four floats between rows: the lanes of a warp write to different banks.
  static constexpr int kSumsStride = kOutputs + 4, kSums = kRows * kSumsStride;
  static constexpr int kSharedBytes =
      kStages * kStageBytes > kInnerWarps* kSums * 4 ? kStages* kStageBytes : kInnerWarps* kSums * 4;
  static_assert(kRows % 8 == 0 && kOutputs % 32 == 0 && kOutputWarps * kInnerWarps == kWarps);
};

/// Addresses and strides are multiples of 8 elements, so is `inputs`, and `outputs` if W is stored transposed.
struct FewRowsOperands {
  const bf16 *x, *weight;
  std::int64_t x_stride, weight_stride;
  int rows, outputs, inputs;
};

/// Byte of 16-byte word `word` of a row of kWords words. Words are permuted so that those which ldmatrix reads
/// together, the same word of eight successive rows, lie in different banks.
template <int kWords>
WEFT_FLASH_INLINE std::uint32_t few_rows_place(int row, int word) {
  static_assert(kWords == 4 || kWords % 8 == 0);
  const int permuted = kWords == 4 ? word ^ (row / 2 % 4) : word ^ (row % 8);
  return static_cast<std::uint32_t>(row * kWords + permuted) * 16;
}

template <class Tile, class Context>
WEFT_FLASH_INLINE void few_rows_load_weight(Context& context, const FewRowsOperands& o, int first_output, int chunk,
                                            int stage) {
  constexpr int kWords = Tile::kTransposed ? Tile::kOutputs / 8 : Tile::kChunk / 8;
  const std::uint32_t base = static_cast<std::uint32_t>(stage * Tile::kStageBytes + Tile::kRowsBytes);
  for (int i = context.thread; i < Tile::kOutputs * Tile::kChunk / 8; i += Tile::kThreads) {
    const int row = i / kWords, word = i % kWords;
    const int output = first_output + (Tile::kTransposed ? 8 * word : row),
              input = chunk * Tile::kChunk + (Tile::kTransposed ? row : 8 * word);
    const bool valid = output < o.outputs && input < o.inputs;
    const std::int64_t at = Tile::kTransposed ? input * o.weight_stride + output : output * o.weight_stride + input;
    context.copy16(base + few_rows_place<kWords>(row, word), o.weight + (valid ? at : 0), valid);
  }
}

template <class Tile, class Context>
WEFT_FLASH_INLINE void few_rows_load_rows(Context& context, const FewRowsOperands& o, int chunk, int stage) {
  constexpr int kWords = Tile::kChunk / 8;
  const std::uint32_t base = static_cast<std::uint32_t>(stage * Tile::kStageBytes);
  for (int i = context.thread; i < Tile::kRows * kWords; i += Tile::kThreads) {
    const int row = i / kWords, word = i % kWords, input = chunk * Tile::kChunk + 8 * word;
    const bool valid = row < o.rows && input < o.inputs;
    context.copy16(base + few_rows_place<kWords>(row, word), o.x + (valid ? row * o.x_stride + input : 0), valid);
  }
}

/// One chunk in shared memory.
template <class Tile, class Context>
WEFT_FLASH_INLINE void few_rows_multiply(Context& context, int stage, float (&sum)[Tile::kRows / 8][4]) {
  constexpr int kWords = Tile::kChunk / 8, kWeightWords = Tile::kTransposed ? Tile::kOutputs / 8 : kWords;
  const int lane = context.thread % 32, warp = context.thread / 32, output_warp = warp % Tile::kOutputWarps,
            inner_warp = warp / Tile::kOutputWarps;
  const int matrix = lane / 8, of_matrix = lane % 8;
  const std::uint32_t rows = static_cast<std::uint32_t>(stage * Tile::kStageBytes), weight = rows + Tile::kRowsBytes;
#pragma unroll
  for (int group = inner_warp; group < Tile::kChunk / 16; group += Tile::kInnerWarps) {
    std::uint32_t a[4];
    if constexpr (Tile::kTransposed)
      context.load_matrices_transposed(a, weight + few_rows_place<kWeightWords>(16 * group + matrix / 2 * 8 + of_matrix,
                                                                                2 * output_warp + matrix % 2));
    else
      context.load_matrices(a, weight + few_rows_place<kWeightWords>(16 * output_warp + matrix % 2 * 8 + of_matrix,
                                                                     2 * group + matrix / 2));
#pragma unroll
    for (int first = 0; first < Tile::kRows / 8; first += 2) {
      std::uint32_t b[4];  // of eight rows only the first half is used
      const int row = 8 * first + (Tile::kRows == 8 ? 0 : matrix / 2 * 8) + of_matrix;
      context.load_matrices(b, rows + few_rows_place<kWords>(row, 2 * group + matrix % 2));
      context.multiply(sum[first], a, b[0], b[1]);
      if constexpr (Tile::kRows > 8) context.multiply(sum[first + 1], a, b[2], b[3]);
    }
  }
}

/// Sums over chunks [begin, end) of the inputs: float [kRows][kSumsStride] at the beginning of shared memory, complete
/// for all threads of the block. await_rows() is called before x is read: until then only W is loaded.
template <class Tile, class Context, class AwaitRows>
WEFT_FLASH_INLINE void few_rows_sum(Context& context, const FewRowsOperands& o, int first_output, int begin, int end,
                                    const AwaitRows& await_rows) {
  constexpr int kStages = Tile::kStages;
  const int count = end - begin;
  for (int stage = 0; stage < kStages && stage < count; ++stage)
    few_rows_load_weight<Tile>(context, o, first_output, begin + stage, stage);
  await_rows();
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < count) few_rows_load_rows<Tile>(context, o, begin + stage, stage);
    context.commit();
  }
  float sum[Tile::kRows / 8][4] = {};
  for (int i = 0; i < count; ++i) {
    const int stage = i % kStages;
    context.template wait<kStages - 1>();
    context.sync();
    few_rows_multiply<Tile>(context, stage, sum);
    if (count > kStages) {
      context.sync();  // the stage has been read
      if (i + kStages < count) {
        few_rows_load_weight<Tile>(context, o, first_output, begin + i + kStages, stage);
        few_rows_load_rows<Tile>(context, o, begin + i + kStages, stage);
      }
    }
    context.commit();
  }
  context.template wait<0>();
  context.sync();  // sums take the place of the stages

  const int lane = context.thread % 32, warp = context.thread / 32, output_warp = warp % Tile::kOutputWarps,
            inner_warp = warp / Tile::kOutputWarps;
  float* const sums = reinterpret_cast<float*>(context.shared);
#pragma unroll
  for (int tile = 0; tile < Tile::kRows / 8; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int output = 16 * output_warp + i / 2 * 8 + lane / 4, row = 8 * tile + lane % 4 * 2 + i % 2;
      sums[inner_warp * Tile::kSums + row * Tile::kSumsStride + output] = sum[tile][i];
    }
  context.sync();
  if constexpr (Tile::kInnerWarps > 1) {
    const int used = flash_least(Tile::kRows, o.rows) * Tile::kSumsStride;
    for (int i = context.thread; i < used; i += Tile::kThreads) {
      float total = sums[i];
#pragma unroll
      for (int k = 1; k < Tile::kInnerWarps; ++k) total += sums[k * Tile::kSums + i];
      sums[i] = total;
    }
    context.sync();
  }
}

constexpr int kFewRowsMostParts = 8;

/// Blocks that share a tile, each with a range of chunks: enough blocks for a GPU of about 132 multiprocessors.
/// Depends on outputs and inputs alone.
constexpr int few_rows_parts(std::int64_t tiles, std::int64_t chunks) {
  constexpr int kWanted = 128;
  int parts = 1;
  while (parts < kFewRowsMostParts && tiles * parts < kWanted && 2 * parts <= chunks) parts *= 2;
  return parts;
}

}  // namespace weft::kernels
