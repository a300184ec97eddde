// SPDX-License-Identifier: Apache-2.0
//
// Part of a product of few rows, y = x Wᵀ, on tensor cores: the code of one thread of a block that sums one tile of
// outputs over a range of inputs. The Context is that of attention/flash_tiles.hpp; a test runs this code on the host.
//
// W is the first operand of mma.m16n8k16 (16 outputs), the rows of x are the second (8 rows): one row costs as much as
// eight. Each warp takes 16 outputs, all rows, and every kInnerWarps-th group of 16 inputs of a chunk; the sums of the
// warps are added in their order.
//
// Sums may be those of normalised rows (linear_operands.hpp): x is then weight ∘ h, and the statistics of a row of h,
// which follow from the moments that the product before has left (row_moments.hpp), are applied to its sums. Nothing
// is added between the arrival of the rows and their products.
//
// Invariant. The order in which a sum is formed depends on the number of outputs and inputs alone: a row has the same
// bits whatever the other rows are and however many.
#pragma once

#include <cmath>

#include "kernels/language/attention/flash_tiles.hpp"
#include "kernels/language/linear/row_moments.hpp"

namespace weft::kernels {

/// Division of the work of a block. kRows: rows of x, the rest are zeros; kOutputs: outputs of the tile; kTransposed: W
/// is stored as [inputs, outputs]; kNormalised: the sums are those of normalised rows.
template <int kRows_, int kOutputs_, bool kTransposed_, bool kNormalised_ = false>
struct FewRowsTile {
  static constexpr int kRows = kRows_, kOutputs = kOutputs_;
  static constexpr bool kTransposed = kTransposed_, kNormalised = kNormalised_;
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kChunk = 64;                       ///< inputs that are loaded together
  static constexpr int kStages = kOutputs == 32 ? 6 : 4;  ///< chunks in flight
  static constexpr int kBands = kOutputs == 64 ? 2 : 1;   ///< of 16 outputs, of a warp
  static constexpr int kOutputWarps = kOutputs / (16 * kBands), kInnerWarps = kWarps / kOutputWarps;
  static constexpr int kGroups = kChunk / 16 / kInnerWarps;  ///< of 16 inputs, of a warp, per chunk
  static constexpr int kUnits = kRows * kOutputs / 4;        ///< of four outputs of a row
  /// Bytes of a stage: rows, weights.
  static constexpr int kRowsBytes = kRows * kChunk * 2, kStageBytes = kRowsBytes + kOutputs * kChunk * 2;
  /// Sums are stored as [row][output]. Four floats between rows: the lanes of a warp write to different banks.
  static constexpr int kSumsStride = kOutputs + 4, kSums = kRows * kSumsStride;
  /// Offset of the sums in shared memory: after the stages, or with many rows in place of the stages.
  static constexpr int sums_at(int chunks) {
    return kRows > 8 ? 0 : (chunks < kStages ? chunks : kStages) * kStageBytes;
  }
  /// Bytes for sums over `chunks` chunks.
  static constexpr int shared_bytes(int chunks) {
    const int stages = (chunks < kStages ? chunks : kStages) * kStageBytes,
              sums = sums_at(chunks) + kInnerWarps * kSums * 4;
    return stages > sums ? stages : sums;
  }
  static_assert(kRows % 8 == 0 && kOutputs % 32 == 0 && kOutputWarps * kInnerWarps == kWarps);
};

/// Statistics of the rows of a norm.
struct FewRowsNorm {
  const Moments* moments;  ///< of h, [rows, moment_groups(inputs)]; null: no norm
  float epsilon;
  float share;   ///< 1 / inputs: divided before the kernel starts
  bool centred;  ///< false: the mean is not subtracted
};

/// Addresses and strides are multiples of 8 elements, so is `inputs`, and `outputs` if W is stored transposed.
struct FewRowsOperands {
  const bf16 *x, *weight;
  std::int64_t x_stride, weight_stride;
  int rows, outputs, inputs;
  FewRowsNorm norm = {};  ///< of a tile that is kNormalised
};

/// Byte of 16-byte word `word` of a row of kWords words. Words are permuted so that those which ldmatrix reads
/// together, the same word of eight successive rows, lie in different banks.
template <int kWords>
WEFT_FLASH_INLINE std::uint32_t few_rows_place(int row, int word) {
  static_assert(kWords == 4 || kWords % 8 == 0);
  const int permuted = kWords == 4 ? word ^ (row / 2 % 4) : word ^ (row % 8);
  return static_cast<std::uint32_t>(row * kWords + permuted) * 16;
}

/// The 16-byte words that a thread copies to each stage: from addresses that are formed once.
template <class Tile>
struct FewRowsWords {
  static constexpr int kWords = Tile::kChunk / 8;
  static constexpr int kWeightWords = Tile::kTransposed ? Tile::kOutputs / 8 : kWords;
  static constexpr int kWeightRows = Tile::kTransposed ? Tile::kChunk : Tile::kOutputs;
  static constexpr int kWeightRowsAtOnce = Tile::kThreads / kWeightWords;
  /// Rows of x, and stages of them, that the threads copy at once.
  static constexpr int kRowsAtOnce = Tile::kRows < 32 ? Tile::kRows : 32,
                       kStagesAtOnce = Tile::kThreads / (kWords * kRowsAtOnce);
  static_assert(kWeightRows % kWeightRowsAtOnce == 0);

  int row, stage;       ///< of the first word of x
  const bf16* x;        ///< that word of the first chunk
  std::uint32_t place;  ///< where it goes
  int x_inputs;         ///< from it to the end of the row
  const bf16* weight;   ///< the first word of W of the first chunk
  std::uint32_t weight_place;
  std::int64_t weight_step;       ///< elements from a chunk to the next
  int weight_row, weight_column;  ///< of that word, from the first output and the first input of the chunk

  WEFT_FLASH_INLINE FewRowsWords(int thread, const FewRowsOperands& o, int first_output, int begin) {
    const int word = thread % kWords;
    row = thread / kWords % kRowsAtOnce;
    stage = thread / (kWords * kRowsAtOnce);
    const int input = (begin + stage) * Tile::kChunk + 8 * word;
    x = o.x + row * o.x_stride + input;
    x_inputs = o.inputs - input;
    place = static_cast<std::uint32_t>(stage * Tile::kStageBytes) + few_rows_place<kWords>(row, word);
    weight_row = thread / kWeightWords;
    weight_column = thread % kWeightWords * 8;
    weight_place =
        static_cast<std::uint32_t>(Tile::kRowsBytes) + few_rows_place<kWeightWords>(weight_row, weight_column / 8);
    const std::int64_t first = std::int64_t{begin} * Tile::kChunk;
    weight = Tile::kTransposed ? o.weight + (first + weight_row) * o.weight_stride + first_output + weight_column
                               : o.weight + (first_output + weight_row) * o.weight_stride + first + weight_column;
    weight_step = Tile::kTransposed ? Tile::kChunk * o.weight_stride : std::int64_t{Tile::kChunk};
  }
};

/// Loads chunk `chunk`, the i-th of this block.
template <class Tile, class Context>
WEFT_FLASH_INLINE void few_rows_load_weight(Context& context, const FewRowsOperands& o, const FewRowsWords<Tile>& words,
                                            int first_output, int chunk, int i, int stage) {
  using Words = FewRowsWords<Tile>;
  const bf16* const from = words.weight + i * words.weight_step;
  const std::uint32_t to = words.weight_place + static_cast<std::uint32_t>(stage * Tile::kStageBytes);
  const int input = chunk * Tile::kChunk;
#pragma unroll
  for (int r = 0; r < Words::kWeightRows; r += Words::kWeightRowsAtOnce) {
    // The permutation of words repeats after 8 rows.
    const int row = words.weight_row + r;
    const bool valid = Tile::kTransposed ? input + row < o.inputs && first_output + words.weight_column < o.outputs
                                         : first_output + row < o.outputs && input + words.weight_column < o.inputs;
    context.copy16(to + static_cast<std::uint32_t>(r * Words::kWeightWords * 16),
                   valid ? from + r * o.weight_stride : o.weight, valid);
  }
}

/// Loads the rows of the first `count` chunks, at most kStages.
template <class Tile, class Context>
WEFT_FLASH_INLINE void few_rows_load_rows(Context& context, const FewRowsOperands& o, const FewRowsWords<Tile>& words,
                                          int count) {
  using Words = FewRowsWords<Tile>;
#pragma unroll
  for (int s = 0; s < Tile::kStages; s += Words::kStagesAtOnce) {
    if (words.stage + s >= flash_least(count, Tile::kStages)) break;
#pragma unroll
    for (int r = 0; r < Tile::kRows; r += Words::kRowsAtOnce) {
      const bool valid = words.row + r < o.rows && s * Tile::kChunk < words.x_inputs;
      context.copy16(words.place + static_cast<std::uint32_t>(s * Tile::kStageBytes + r * Tile::kChunk * 2),
                     valid ? words.x + r * o.x_stride + s * Tile::kChunk : o.x, valid);
    }
  }
}
/// Loads the rows of one chunk to a stage that has been read.
template <class Tile, class Context>
WEFT_FLASH_INLINE void few_rows_load_rows_of(Context& context, const FewRowsOperands& o, int chunk, int stage) {
  constexpr int kWords = Tile::kChunk / 8;
#pragma unroll 1
  for (int i = context.thread; i < Tile::kRows * kWords; i += Tile::kThreads) {
    const int row = i / kWords, word = i % kWords, input = chunk * Tile::kChunk + 8 * word;
    const bool valid = row < o.rows && input < o.inputs;
    context.copy16(static_cast<std::uint32_t>(stage * Tile::kStageBytes) + few_rows_place<kWords>(row, word),
                   o.x + (valid ? row * o.x_stride + input : 0), valid);
  }
}

struct alignas(16) FewRowsColumns {
  float value[4];
};

/// a b + c, rounded once: a compiler does not choose, so that a row has the same bits in every tile.
WEFT_FLASH_INLINE float few_rows_add_product(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}
WEFT_FLASH_INLINE float few_rows_inverse_root(float x) {
#ifdef __CUDA_ARCH__
  return rsqrtf(x);
#else
  return 1.0f / std::sqrt(x);
#endif
}

/// Statistics of a row: norm(h) = inverse (weight ∘ (h - mean)) + bias.
struct FewRowsStatistics {
  float mean, inverse;
};

/// Merges the moments of a row. kLanes successive lanes share a row; all lanes of a warp call the functions together.
///
/// The moments of groups of columns are merged as deviations from the mean of the first group: their squares are not
/// much larger than the variance, so that no digits cancel.
class FewRowsMoments {
  static constexpr int kLanes = 8, kAtOnce = 4;  ///< kAtOnce: groups that a lane reads at once

 public:
  /// Reads the first groups.
  WEFT_FLASH_INLINE void load(const FewRowsOperands& o, int row, int thread) {
    lane_ = thread % kLanes;
    groups_ = static_cast<int>(moment_groups(o.inputs));
    moments_ = o.norm.moments + std::int64_t{flash_least(row, o.rows - 1)} * groups_;
    origin_ = moments_[0].mean;
    load_groups(lane_);
  }

  template <class Context>
  WEFT_FLASH_INLINE FewRowsStatistics merge(Context& context, const FewRowsOperands& o) {
    float sum = 0.0f, squares = 0.0f, within = 0.0f;
#pragma unroll 1
    for (int begin = lane_;;) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int left = o.inputs - (begin + i * kLanes) * kMomentColumns;
        const float columns = static_cast<float>(flash_most(0, flash_least(kMomentColumns, left))),
                    distance = read_[i].mean - origin_;
        sum = few_rows_add_product(columns, distance, sum);
        squares = few_rows_add_product(columns * distance, distance, squares);
        within += left > 0 ? read_[i].squares : 0.0f;
      }
      begin += kLanes * kAtOnce;
      if (begin - lane_ >= groups_) break;
      load_groups(begin);
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      sum += context.shuffle_xor(sum, mask);
      squares += context.shuffle_xor(squares, mask);
      within += context.shuffle_xor(within, mask);
    }
    const float mean = few_rows_add_product(sum, o.norm.share, origin_),
                about_mean = within + few_rows_add_product(-sum, sum * o.norm.share, squares);
    float variance = few_rows_add_product(about_mean, o.norm.share, o.norm.epsilon);
    if (!o.norm.centred) variance = few_rows_add_product(mean, mean, variance);
    return {o.norm.centred ? mean : 0.0f, few_rows_inverse_root(variance)};
  }

 private:
  WEFT_FLASH_INLINE void load_groups(int begin) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) read_[i] = moments_[flash_least(begin + i * kLanes, groups_ - 1)];
  }

  const Moments* moments_;
  int groups_, lane_;
  float origin_;
  Moments read_[kAtOnce];
};

/// The sum of a normalised row from that of x, where `s` is the sum of the row of W (NormTerms).
WEFT_FLASH_INLINE float few_rows_normalised(const FewRowsStatistics& row, float sum, float s) {
  return row.inverse * few_rows_add_product(-row.mean, s, sum);
}

/// Addresses from which a lane reads its part of the operands of a group of 16 inputs in a stage.
template <class Tile>
struct FewRowsPlaces {
  std::uint32_t weight[Tile::kGroups][Tile::kBands], rows[Tile::kGroups];

  WEFT_FLASH_INLINE explicit FewRowsPlaces(int thread) {
    constexpr int kWords = Tile::kChunk / 8, kWeightWords = Tile::kTransposed ? Tile::kOutputs / 8 : kWords;
    const int lane = thread % 32, warp = thread / 32, output_warp = warp % Tile::kOutputWarps,
              inner_warp = warp / Tile::kOutputWarps, matrix = lane / 8, of_matrix = lane % 8;
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
      const int group = inner_warp + g * Tile::kInnerWarps;
#pragma unroll
      for (int band = 0; band < Tile::kBands; ++band) {
        const int outputs = Tile::kBands * output_warp + band;  // which 16 of the tile
        weight[g][band] =
            Tile::kRowsBytes +
            (Tile::kTransposed
                 ? few_rows_place<kWeightWords>(16 * group + matrix / 2 * 8 + of_matrix, 2 * outputs + matrix % 2)
                 : few_rows_place<kWeightWords>(16 * outputs + matrix % 2 * 8 + of_matrix, 2 * group + matrix / 2));
      }
      rows[g] = few_rows_place<kWords>((Tile::kRows == 8 ? 0 : matrix / 2 * 8) + of_matrix, 2 * group + matrix % 2);
    }
  }
};

/// Sums of a warp, as tensor cores form them.
template <class Tile>
struct FewRowsSums {
  float of[Tile::kBands][Tile::kRows / 8][4] = {};
};

template <class Tile, class Context>
WEFT_FLASH_INLINE void few_rows_read_weight(Context& context, const FewRowsPlaces<Tile>& places, int stage, int g,
                                            std::uint32_t (&weight)[Tile::kBands][4]) {
#pragma unroll
  for (int band = 0; band < Tile::kBands; ++band) {
    const std::uint32_t at = places.weight[g][band] + static_cast<std::uint32_t>(stage * Tile::kStageBytes);
    if constexpr (Tile::kTransposed)
      context.load_matrices_transposed(weight[band], at);
    else
      context.load_matrices(weight[band], at);
  }
}

/// Adds the products of one chunk in shared memory.
template <class Tile, class Context>
WEFT_FLASH_INLINE void few_rows_multiply(Context& context, const FewRowsPlaces<Tile>& places, int stage,
                                         FewRowsSums<Tile>& sums) {
  const std::uint32_t at = static_cast<std::uint32_t>(stage * Tile::kStageBytes);
#pragma unroll
  for (int g = 0; g < Tile::kGroups; ++g) {
    std::uint32_t weight[Tile::kBands][4];
    few_rows_read_weight<Tile>(context, places, stage, g, weight);
#pragma unroll
    for (int first = 0; first < Tile::kRows / 8; first += 2) {
      std::uint32_t rows[4];  // of eight rows only the first half is used
      context.load_matrices(rows, places.rows[g] + at + static_cast<std::uint32_t>(8 * first * Tile::kChunk * 2));
#pragma unroll
      for (int band = 0; band < Tile::kBands; ++band) {
        context.multiply(sums.of[band][first], weight[band], rows[0], rows[1]);
        if constexpr (Tile::kRows > 8) context.multiply(sums.of[band][first + 1], weight[band], rows[2], rows[3]);
      }
    }
  }
}

/// The chunks of all stages, of which `count` are used. Few rows: reads all operands before the first product.
template <class Tile, class Context>
WEFT_FLASH_INLINE void few_rows_multiply_all(Context& context, const FewRowsPlaces<Tile>& places, int count,
                                             FewRowsSums<Tile>& sums) {
  if constexpr (Tile::kRows == 8 && Tile::kGroups == 1) {
    std::uint32_t weight[Tile::kStages][Tile::kBands][4], rows[Tile::kStages][4];
#pragma unroll
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      if (stage >= count) break;
      few_rows_read_weight<Tile>(context, places, stage, 0, weight[stage]);
      context.load_matrices(rows[stage], places.rows[0] + static_cast<std::uint32_t>(stage * Tile::kStageBytes));
    }
#pragma unroll
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      if (stage >= count) break;
#pragma unroll
      for (int band = 0; band < Tile::kBands; ++band)
        context.multiply(sums.of[band][0], weight[stage][band], rows[stage][0], rows[stage][1]);
    }
  } else {
#pragma unroll
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      if (stage >= count) break;
      few_rows_multiply<Tile>(context, places, stage, sums);
    }
  }
}

/// Position of the four sums of a unit.
template <class Tile>
WEFT_FLASH_INLINE FewRowsColumns* few_rows_unit(unsigned char* shared, int most_chunks, int unit) {
  constexpr int kOfRow = Tile::kOutputs / 4;
  float* const sums = reinterpret_cast<float*>(shared + Tile::sums_at(most_chunks));
  return reinterpret_cast<FewRowsColumns*>(sums + unit / kOfRow * Tile::kSumsStride + unit % kOfRow * 4);
}

/// Sums over chunks [begin, end) of the inputs. finish(unit, sums, at) gets four: of row unit / (kOutputs / 4) and the
/// outputs from 4 (unit % (kOutputs / 4)) of the tile; `at` is memory of this unit. Units are those of used rows and of
/// other rows in the same warp; the units of a thread rise by kThreads from its number. await_rows() is called before
/// x is read: until then only weights are loaded.
///
/// What follows await_rows is a chain of latencies, not of work: addresses are formed before it, and the loops over the
/// stages are unrolled.
template <class Tile, class Context, class AwaitRows, class Finish>
WEFT_FLASH_INLINE void few_rows_sum(Context& context, const FewRowsOperands& o, int first_output, int begin, int end,
                                    int most_chunks, const AwaitRows& await_rows, const Finish& finish) {
  constexpr int kStages = Tile::kStages;
  const int count = end - begin, thread = context.thread;
  const FewRowsWords<Tile> words(thread, o, first_output, begin);
  const FewRowsPlaces<Tile> places(thread);
#pragma unroll 1
  for (int i = 0; i < kStages && i < count; ++i)
    few_rows_load_weight<Tile>(context, o, words, first_output, begin + i, i, i);
  await_rows();
  few_rows_load_rows<Tile>(context, o, words, count);
  context.commit();
  context.template wait<0>();
  context.sync();
  FewRowsSums<Tile> of_warp;
  if (count <= kStages) {
    few_rows_multiply_all<Tile>(context, places, count, of_warp);
  } else {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages, next = i + kStages;
      if (i >= kStages) {
        context.template wait<kStages - 1>();
        context.sync();
      }
      few_rows_multiply<Tile>(context, places, stage, of_warp);
      context.sync();  // the stage has been read
      if (next < count) {
        few_rows_load_weight<Tile>(context, o, words, first_output, begin + next, next, stage);
        few_rows_load_rows_of<Tile>(context, o, begin + next, stage);
      }
      context.commit();
    }
  }
  if (Tile::kRows > 8) context.sync();  // sums take the place of the stages

  const int lane = thread % 32, warp = thread / 32, output_warp = warp % Tile::kOutputWarps,
            inner_warp = warp / Tile::kOutputWarps;
  float* const sums = reinterpret_cast<float*>(context.shared + Tile::sums_at(most_chunks));
#pragma unroll
  for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
    for (int tile = 0; tile < Tile::kRows / 8; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int output = 16 * (Tile::kBands * output_warp + band) + i / 2 * 8 + lane / 4,
                  row = 8 * tile + lane % 4 * 2 + i % 2;
        sums[inner_warp * Tile::kSums + row * Tile::kSumsStride + output] = of_warp.of[band][tile][i];
      }
  context.sync();
  constexpr int kOfRow = Tile::kOutputs / 4;
#pragma unroll
  for (int round = 0; round < (Tile::kUnits + Tile::kThreads - 1) / Tile::kThreads; ++round) {
    const int unit = thread + round * Tile::kThreads;
    if (unit / 32 * 32 / kOfRow >= flash_least(Tile::kRows, o.rows)) break;  // of the whole warp
    FewRowsColumns* const at = few_rows_unit<Tile>(context.shared, most_chunks, unit);
    FewRowsColumns total = *at;
#pragma unroll
    for (int k = 1; k < Tile::kInnerWarps; ++k) {
      const FewRowsColumns more = at[k * Tile::kSums / 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) total.value[i] += more.value[i];
    }
    finish(unit, total, at);
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

/// Units that a block gets from the blocks of its cluster: 32 in turn for each block.
template <class Tile>
constexpr int few_rows_exchanged(int parts) {
  return (Tile::kUnits / 32 + parts - 1) / parts * 32;
}

/// Dynamic shared memory of a block: stages and sums, then what it gets from the blocks of its cluster.
template <class Tile>
constexpr int few_rows_shared_bytes(int most_chunks, int parts) {
  return Tile::shared_bytes(most_chunks) +
         (parts == 1 ? 0 : parts * few_rows_exchanged<Tile>(parts) * static_cast<int>(sizeof(FewRowsColumns)));
}

}  // namespace weft::kernels
