// SPDX-License-Identifier: Apache-2.0
//
// Attention of numbers of 16 bits against a cache: tensor cores form the products. One query takes few of their
// columns, but scalar instructions, which unpack and multiply every element, were the limit with short contexts.
//
// Keys, and values transposed, are the first operand, 16 positions or columns of a head at a time. Of the eight columns
// of the second operand query head h has 2 h and 2 h + 1: probabilities are the sum of two rounded numbers, and so
// exact to 16 bits and more. Lane i of a warp has the scores, and the sums, of head i % 4.
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/attention/flash_context_cuda.cuh"
#include "kernels/language/attention/flash_tiles.hpp"
#include "kernels/language/decode/cached_attention_cuda.cuh"
#include "kernels/language/exponential.hpp"
#include "kernels/language/rows_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

template <int kHead_, class Number_>
struct CachedTile {
  static constexpr int kHead = kHead_;  ///< columns of a head, or more
  using Number = Number_;
  using Sums = StrandSums<kHead>;
  static constexpr int kHeads = kHead <= 128 ? 4 : 2, kPart = 16;
  static constexpr int kTileBytes = kPart * kHead * 2, kStageBytes = 2 * kTileBytes;
  static_assert(kStageBytes * kCachedLeastStages + Sums::bytes(kMostStrands, kHeads) <= kDynamicSharedMemory);
};

template <class Tile>
__global__ void __launch_bounds__(kCachedMostWarps* kWarp, Tile::kHead <= 64 ? 3 : 1)
    attend(const __grid_constant__ CachedArguments a) {
#ifdef WEFT_BEFORE_AMPERE
  __trap();  // Runtime rejects these GPUs
#else
  constexpr int kHead = Tile::kHead, kChunks = kHead / 8, kPart = Tile::kPart;
  using Number = typename Tile::Number;
  allow_next_kernel();
  const CachedAttention& shape = a.shape;
  const CachedWork<kPart, Tile::kHeads> w(a);
  auto* const out = static_cast<Number*>(a.out.data) + w.row * a.out.stride + std::int64_t{w.first_head} * w.size;
  if (!w.runs()) {
    await_previous_kernel();  // which may still read `out`
    if (w.rank == 0)
      for (int i = w.thread; i < w.heads * w.size; i += w.threads) out[i] = from_float<Number>(0.0f);
    return;
  }
  if (w.rank >= w.blocks) return;

  // This lane copies one word of every kRows-th row of a part.
  constexpr int kRows = kWarp / kChunks;
  const int chunk = w.lane % kChunks, first_row = w.lane / kChunks;
  const bool active = chunk * 8 < w.size;
  const std::int64_t key_column = std::int64_t{w.key_head} * w.size + (active ? chunk * 8 : 0);
  auto* const keys = static_cast<Number*>(a.cached_keys.data) + key_column;
  auto* const values = static_cast<Number*>(a.cached_values.data) + key_column;
  const int prefix = w.sequence.prefix, prefix_row = static_cast<int>(w.sequence.prefix_begin),
            own_row = static_cast<int>(w.sequence.own_begin) - prefix, stride = static_cast<int>(a.cached_keys.stride);
  const auto stored = [=](int key) {  // of a position: elements from `keys` and from `values`
    return std::int64_t{key + (key < prefix ? prefix_row : own_row)} * stride;
  };
  DeviceContext<Number> context;
  const auto ring = static_cast<std::uint32_t>(w.warp * a.stages * Tile::kStageBytes);
  // Rows that are not stored are zeros.
  const auto request = [&](int part, std::uint32_t to) {
#pragma unroll
    for (int i = 0; i < kPart / kRows; ++i) {
      const int r = i * kRows + first_row, key = w.origin + part * kPart + r;
      const bool valid = active && key >= w.lower && key < w.position;
      const std::int64_t at = valid ? stored(key) : 0;
      copy16_once(context.base + to + flash_place<kHead>(r, chunk), keys + at, valid);
      copy16_once(context.base + to + Tile::kTileBytes + flash_place<kHead>(r, chunk), values + at, valid);
    }
  };
  PartOfWarp ahead(w.first_strand);
  const auto request_next = [&](int stage) {
    if (ahead.strand < w.strands) {
      request(ahead.part, ring + static_cast<std::uint32_t>(stage * Tile::kStageBytes));
      ahead.advance(w.parts, w.strands, w.strand_step);
    }
    commit_copies();
  };
  for (int stage = 0; stage < a.stages; ++stage) request_next(stage);
  if (w.blocks > 1) meet_cluster();  // all blocks exist: their shared memory may be written
  await_previous_kernel();

  // The new key and value, of the lanes that copy this row of the last part.
  uint4 new_key{}, new_value{};
  const int new_row = w.position % kPart;
  const bool has_new = active && new_row % kRows == first_row;
  if (has_new) {
    const auto load = [&](const AnyMatrix& rows) {
      return __ldcg(
          reinterpret_cast<const uint4*>(static_cast<const Number*>(rows.data) + w.row * rows.stride + key_column));
    };
    new_key = load(a.keys);
    new_value = load(a.values);
  }
  // Second operand: column 2 h has head h; 0 elsewhere.
  std::uint32_t query[kHead / 16][2];
#pragma unroll
  for (int i = 0; i < kHead / 8; ++i) {
    const int column = 8 * i + w.lane % 4 * 2, h = w.lane / 8;
    query[i / 2][i % 2] = 0;
    if (w.lane / 4 % 2 == 0 && h < w.heads && column < w.size)
      query[i / 2][i % 2] = __ldcg(reinterpret_cast<const unsigned*>(static_cast<const Number*>(a.queries.data) +
                                                                     w.row * a.queries.stride +
                                                                     std::int64_t{w.first_head + h} * w.size + column));
  }
  const int head = w.lane % 4;

  const typename Tile::Sums sums(shared_memory + w.warps * a.stages * Tile::kStageBytes, w.strands, w.heads),
      all_sums = sums.of_cluster(w.blocks);
  const float scale = shape.scale * kLog2OfE, cap = shape.softcap * kLog2OfE;
  int stage = 0;
  for (int strand = w.first_strand; strand < w.strands; strand += w.strand_step) {
    float mixed[kHead / 16][4] = {}, largest = -FLT_MAX, total = 0.0f;
    for (int part = strand; part < w.parts; part += w.strands) {
      const std::uint32_t key_tile = ring + static_cast<std::uint32_t>(stage * Tile::kStageBytes),
                          value_tile = key_tile + Tile::kTileBytes;
      wait_for_oldest(a.stages);
      if (part == w.parts - 1 && has_new) {
        const std::uint32_t place = context.base + flash_place<kHead>(new_row, chunk);
        store_shared16(place + key_tile, new_key);
        store_shared16(place + value_tile, new_value);
        if (w.first_group) {
          *reinterpret_cast<uint4*>(keys + stored(w.position)) = new_key;
          *reinterpret_cast<uint4*>(values + stored(w.position)) = new_value;
        }
      }
      __syncwarp();
      float score[4] = {};
#pragma unroll
      for (int k = 0; k < kHead / 16; ++k) {
        std::uint32_t rows[4];
        flash_rows<kHead>(context, key_tile, 0, k, rows);
        context.multiply(score, rows, query[k][0], query[k][1]);
      }
      float of_key[2] = {score[0], score[2]}, most = largest;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = w.origin + part * kPart + 8 * i + w.lane / 4;
        of_key[i] *= scale;
        if (shape.softcap > 0) of_key[i] = cap * hyperbolic_tangent(of_key[i] / cap);
        if (key < w.lower || key > w.position) of_key[i] = -FLT_MAX;
        most = fmaxf(most, of_key[i]);
      }
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
      // Sums of a head are in the lanes that have its scores.
      const float factor = context.exp2(largest - most);
      largest = most;
      total *= factor;
#pragma unroll
      for (int n = 0; n < kHead / 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) mixed[n][i] *= factor;
      std::uint32_t probability[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float p = context.exp2(of_key[i] - largest), rounded = from_float<Number>(p);
        total += p;
        probability[i] = context.transposed(flash_pack<Number>(rounded, p - rounded));
      }
#pragma unroll
      for (int n = 0; n < kHead / 16; ++n) {
        std::uint32_t columns[4];
        flash_rows_transposed<kHead>(context, value_tile, 0, n, columns);
        context.multiply(mixed[n], columns, probability[0], probability[1]);
      }
      __syncwarp();  // the stage has been read
      request_next(stage);
      stage = stage + 1 == a.stages ? 0 : stage + 1;
    }
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2) total += __shfl_xor_sync(kAllLanes, total, offset);
    if (head < w.heads) {
      float* const to = all_sums.value + (strand * w.heads + head) * kHead + w.lane / 4;
#pragma unroll
      for (int n = 0; n < kHead / 16; ++n) {
        to[16 * n] = mixed[n][0] + mixed[n][1];
        to[16 * n + 8] = mixed[n][2] + mixed[n][3];
      }
      if (w.lane < 4) all_sums.softmax[strand * w.heads + head] = make_float2(largest, total);
    }
  }
  sums.join(w, [&](int h, int c, float value) { out[h * w.size + c] = from_float<Number>(value); });
#endif
}

template <class Tile>
void launch(const Execution& execution, const CachedArguments& arguments) {
  launch_cached<Tile>(execution, arguments, attend<Tile>);
}

template <class Number>
void launch_by_size(const Execution& execution, const CachedArguments& arguments) {
  const std::int64_t size = arguments.shape.head_size;
  if (size <= 32) return launch<CachedTile<32, Number>>(execution, arguments);
  if (size <= 64) return launch<CachedTile<64, Number>>(execution, arguments);
  if (size <= 128) return launch<CachedTile<128, Number>>(execution, arguments);
  launch<CachedTile<256, Number>>(execution, arguments);
}

struct StoreRows {
  AnyMatrix in, out;
  const std::int64_t* to;

  template <int kWidth>
  __device__ void step(std::int64_t row, std::int64_t column) const {
    if (to[row] < 0) return;
    float value[kWidth];
    load_columns(in, row, column, value);
    store_columns(out, to[row], column, value);
  }
};

}  // namespace

void store_rows(const Execution& execution, AnyMatrix in, Array<const std::int64_t> to, AnyMatrix out) {
  for_vectors(execution, "store_rows", in.rows, in.columns, vectors_fit(in.columns, in, out),
              StoreRows{in, out, to.data});
}

void cached_attention(const Execution& execution, const CachedAttention& shape, AnyMatrix queries, AnyMatrix keys,
                      AnyMatrix values, AnyMatrix cached_keys, AnyMatrix cached_values, AnyMatrix out) {
  if (queries.rows == 0) return;
  if (queries.rows > 65535) throw Error(ExitCode::internal, "cached_attention: more than 65,535 rows");
  const CachedArguments arguments{shape, queries, keys, values, cached_keys, cached_values, out, 1, 1, 1};
  if (queries.type == Scalar::bf16) return launch_by_size<bf16>(execution, arguments);
  launch_by_size<half>(execution, arguments);
}

}  // namespace weft::kernels::cuda
