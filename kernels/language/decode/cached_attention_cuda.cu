// SPDX-License-Identifier: Apache-2.0
//
// Attention of fp32 against a cache. Some lanes (a power of two) form a team that shares a key, with eight columns
// each. A thread reads only what it has copied to shared memory itself.
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/decode/cached_ahead.hpp"
#include "kernels/language/decode/cached_attention_cuda.cuh"
#include "kernels/language/exponential.hpp"
#include "kernels/language/rows_cuda.cuh"

namespace weft::kernels {

namespace portable {
decltype(kernels::cached_attention) cached_attention;
}  // namespace portable

namespace cuda {
namespace {

/// kLanes: of a team.
template <int kLanes_>
struct WideTile {
  static constexpr int kLanes = kLanes_, kColumns = 8 * kLanes, kHeads = 1;
  static constexpr int kTeams = kWarp / kLanes, kKeys = 2, kWords = 2;  ///< keys of a team; 16-byte words of a lane
  static constexpr int kPart = kTeams * kKeys;
  static constexpr int kStageBytes = 2 * kKeys * kWords * kWarp * 16;
  using Sums = StrandSums<kColumns>;
};

extern __shared__ __align__(16) unsigned char attention_memory[];

template <class Tile>
__global__ void __launch_bounds__(kCachedMostWarps* kWarp, 3) attend(const __grid_constant__ CachedArguments a) {
  constexpr int kLanes = Tile::kLanes, kTeams = Tile::kTeams, kKeys = Tile::kKeys, kWords = Tile::kWords;
  allow_next_kernel();
  const CachedAttention& shape = a.shape;
  const CachedWork<Tile::kPart, 1> w(a);
  float* const out = static_cast<float*>(a.out.data) + w.row * a.out.stride + std::int64_t{w.first_head} * w.size;
  if (!w.runs()) {
    await_previous_kernel();  // which may still read `out`
    if (w.rank == 0)
      for (int i = w.thread; i < w.size; i += w.threads) out[i] = 0.0f;
    return;
  }
  if (w.rank >= w.blocks) return;

  const int team = w.lane / kLanes, column = w.lane % kLanes * 8;
  const bool active = column < w.size;
  const std::int64_t key_column = std::int64_t{w.key_head} * w.size + (active ? column : 0);
  float* const keys = static_cast<float*>(a.cached_keys.data) + key_column;
  float* const values = static_cast<float*>(a.cached_values.data) + key_column;
  const auto stored = [&](int key) { return w.sequence.row(key) * a.cached_keys.stride; };  // elements from both
  // Words of this thread: [stage][keys, values][kKeys][kWords].
  const auto ring = static_cast<std::uint32_t>(__cvta_generic_to_shared(attention_memory)) +
                    static_cast<std::uint32_t>(w.warp * a.stages * Tile::kStageBytes + w.lane * 16);
  const auto place = [ring](int stage, int which, int i, int word) {
    return ring + static_cast<std::uint32_t>((((stage * 2 + which) * kKeys + i) * kWords + word) * kWarp * 16);
  };
  const auto key_of = [&](int part, int i) { return w.origin + part * Tile::kPart + i * kTeams + team; };
  // Stored keys and values of a part. Those outside of the sequence count for nothing.
  PartOfWarp ahead(w.first_strand);
  const auto request_next = [&](int stage) {
    if (ahead.strand < w.strands) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int key = key_of(ahead.part, i);
        const bool valid = key >= w.lower && key < w.position;
        const std::int64_t at = valid ? stored(key) : 0;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          copy16_once(place(stage, 0, i, word), keys + at + 4 * word, valid);
          copy16_once(place(stage, 1, i, word), values + at + 4 * word, valid);
        }
      }
      ahead.advance(w.parts, w.strands, w.strand_step);
    }
    commit_copies();
  };
  for (int stage = 0; stage < a.stages; ++stage) request_next(stage);
  if (w.blocks > 1) meet_cluster();  // all blocks exist: their shared memory may be written
  await_previous_kernel();

  const auto load_row = [&](const AnyMatrix& rows, std::int64_t at, StoredColumns<true>& columns) {
#pragma unroll
    for (int word = 0; word < kWords; ++word)
      columns.word[word] = __ldcg(
          reinterpret_cast<const uint4*>(static_cast<const float*>(rows.data) + w.row * rows.stride + at + 4 * word));
  };
  // The new key and value, of the team that has this position in the last part.
  StoredColumns<true> new_key{}, new_value{}, query_columns{};
  const bool has_new = w.position % kTeams == team;
  if (has_new) {
    load_row(a.keys, key_column, new_key);
    load_row(a.values, key_column, new_value);
  }
  if (active) load_row(a.queries, std::int64_t{w.first_head} * w.size + column, query_columns);  // other lanes: 0
  float query[8];
  query_columns.values(Scalar::fp32, query);

  const typename Tile::Sums sums(attention_memory + w.warps * a.stages * Tile::kStageBytes, w.strands, 1),
      all_sums = sums.of_cluster(w.blocks);
  const float scale = shape.scale * kLog2OfE, cap = shape.softcap * kLog2OfE;
  int stage = 0;
  for (int strand = w.first_strand; strand < w.strands; strand += w.strand_step) {
    float mixed[8] = {}, largest = -FLT_MAX, total = 0.0f;
    for (int part = strand; part < w.parts; part += w.strands) {
      wait_for_oldest(a.stages);
      if (part == w.parts - 1 && has_new) {
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          if (key_of(part, i) != w.position) continue;
#pragma unroll
          for (int word = 0; word < kWords; ++word) {
            store_shared16(place(stage, 0, i, word), new_key.word[word]);
            store_shared16(place(stage, 1, i, word), new_value.word[word]);
            if (w.first_group && active) {
              reinterpret_cast<uint4*>(keys + stored(w.position))[word] = new_key.word[word];
              reinterpret_cast<uint4*>(values + stored(w.position))[word] = new_value.word[word];
            }
          }
        }
      }
      const auto load = [&](int which, int i, float(&value)[8]) {
        StoredColumns<true> columns;
#pragma unroll
        for (int word = 0; word < kWords; ++word) columns.word[word] = load_shared16(place(stage, which, i, word));
        columns.values(Scalar::fp32, value);
      };
      float score[kKeys], most = largest;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        float key[8], dot = 0.0f;
        load(0, i, key);
#pragma unroll
        for (int c = 0; c < 8; ++c) dot += query[c] * key[c];
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(kAllLanes, dot, offset);
        dot *= scale;
        if (shape.softcap > 0) dot = cap * hyperbolic_tangent(dot / cap);
        score[i] = key_of(part, i) >= w.lower && key_of(part, i) <= w.position ? dot : -FLT_MAX;
        most = fmaxf(most, score[i]);
      }
#pragma unroll
      for (int offset = kLanes; offset < kWarp; offset *= 2)
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
      const float factor = exp2f(largest - most);
      largest = most;
      total *= factor;
#pragma unroll
      for (int c = 0; c < 8; ++c) mixed[c] *= factor;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        float value[8];
        load(1, i, value);
        const float probability = exp2f(score[i] - largest);
        total += probability;
#pragma unroll
        for (int c = 0; c < 8; ++c) mixed[c] += probability * value[c];
      }
      request_next(stage);
      stage = stage + 1 == a.stages ? 0 : stage + 1;
    }
#pragma unroll
    for (int offset = kLanes; offset < kWarp; offset *= 2) {
      total += __shfl_xor_sync(kAllLanes, total, offset);
#pragma unroll
      for (int c = 0; c < 8; ++c) mixed[c] += __shfl_xor_sync(kAllLanes, mixed[c], offset);
    }
    if (w.lane < kLanes)
#pragma unroll
      for (int c = 0; c < 8; ++c) all_sums.value[strand * Tile::kColumns + column + c] = mixed[c];
    if (w.lane == 0) all_sums.softmax[strand] = make_float2(largest, total);
  }
  sums.join(w, [&](int, int c, float value) { out[c] = value; });
}

template <int kLanes>
void launch(const Execution& execution, const CachedArguments& arguments) {
  launch_cached<WideTile<kLanes>>(execution, arguments, attend<WideTile<kLanes>>);
}

void attend_wide(const Execution& execution, const CachedArguments& arguments) {
  const std::int64_t size = arguments.shape.head_size;
  if (size <= 32) return launch<4>(execution, arguments);
  if (size <= 64) return launch<8>(execution, arguments);
  if (size <= 128) return launch<16>(execution, arguments);
  launch<32>(execution, arguments);
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

/// Measured with 1 to 64 rows at 37 to 900 positions on an H200. The attention itself copies the first positions before
/// its wait; of more requested ones some leave the second-level cache before they are read. With few rows latency is
/// the limit of the attention, not memory.
CachedAhead cached_ahead(const CachedAttention& shape, AnyMatrix cached_keys, AnyMatrix cached_values) {
  constexpr std::int64_t kFirst = 64, kMost = 120;
  static const std::int64_t cache = device_attribute(cudaDevAttrL2CacheSize), usable = cache * 9 / 20;
  const std::int64_t element = bytes_of(cached_keys.type), rows = shape.sequences.size,
                     of_position = 2 * rows * cached_keys.columns * element,  // bytes
      positions = shape.window > 0 ? std::min(shape.window, shape.longest) : shape.longest;
  if (of_position == 0 || of_position * positions < cache / 2) return {};
  return {.sequences = shape.sequences.data,
          .positions = shape.positions.data,
          .keys = static_cast<const std::byte*>(cached_keys.data),
          .values = static_cast<const std::byte*>(cached_values.data),
          .stride = cached_keys.stride * element,
          .bytes = static_cast<std::int32_t>(cached_keys.columns * element),
          .rows = static_cast<std::int32_t>(rows),
          .window = static_cast<std::int32_t>(shape.window),
          .first = kFirst,
          .count = static_cast<std::int32_t>(std::min(kMost, usable / of_position))};
}

void store_rows(const Execution& execution, AnyMatrix in, Array<const std::int64_t> to, AnyMatrix out) {
  for_vectors(execution, "store_rows", in.rows, in.columns, vectors_fit(in.columns, in, out),
              StoreRows{in, out, to.data});
}

void cached_attention(const Execution& execution, const CachedAttention& shape, AnyMatrix queries, AnyMatrix keys,
                      AnyMatrix values, AnyMatrix cached_keys, AnyMatrix cached_values, AnyMatrix out) {
  if (queries.rows == 0) return;
  if (queries.rows > 65535) throw Error(ExitCode::internal, "cached_attention: more than 65,535 rows");
  const CachedArguments arguments{shape, queries, keys, values, cached_keys, cached_values, out, 1, 1, 1};
  if (queries.type == Scalar::fp32)
    attend_wide(execution, arguments);
  else
    attend_narrow(execution, arguments);
}

}  // namespace cuda
}  // namespace weft::kernels
