// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. The keys and values of a sequence are read once, or as often as a key head has groups of four query
// heads: 2 * positions * kv_heads * head_size elements per row.
//
// Some lanes (a power of two) form a team that shares a key, with eight columns each. A thread copies its columns of
// the keys and values of a part, those of several positions, to shared memory, some parts ahead, and reads only what it
// has copied itself: nothing is exchanged between warps until all keys are read. The lanes of a warp have one softmax,
// relative to the largest score so far.
//
// The parts of a long sequence are divided into shares. Of each the sums of the warps are joined, then those of the
// shares. With few rows a cluster of blocks shares a sequence and a group of heads; the first block has the sums of all
// shares. How a sequence is divided depends on its position alone, and so do all bits of the result.
//
// Keys and values of earlier positions are read before the kernel before this one has ended. The new ones are read
// where they came from, and stored for later steps.
#include <cfloat>

#include "kernels/language/attention/attention.hpp"
#include "kernels/language/decode/cached_attention.hpp"
#include "kernels/language/exponential.hpp"
#include "kernels/language/rows_cuda.cuh"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels {

namespace portable {
decltype(kernels::cached_attention) cached_attention;
decltype(kernels::store_rows) store_rows;
}  // namespace portable

namespace cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kLeastStages = 2, kMostStages = 5;
constexpr int kMostShares = 8;        ///< and most blocks of a cluster
constexpr int kSharePositions = 512;  ///< below, a second block would cost more than it saves

struct Arguments {
  CachedAttention shape;
  AnyMatrix queries, keys, values, cached_keys, cached_values, out;
  int groups;  ///< of query heads that share a key head
  int blocks;  ///< that share a sequence and a group: 1, 2, 4 or 8
  int stages;  ///< parts in shared memory
};

/// kLanes: of a team. kHeads: query heads that a block has at most.
template <int kLanes_, int kHeads_, Scalar kType_>
struct Tile {
  static constexpr int kLanes = kLanes_, kHeads = kHeads_;
  static constexpr Scalar kType = kType_;
  static constexpr bool kWide = kType == Scalar::fp32;
  static constexpr int kBytes = kWide ? 4 : 2, kWords = kWide ? 2 : 1;     ///< of an element; of eight columns
  static constexpr int kTeams = kThreads / kLanes, kKeys = kWide ? 2 : 4;  ///< keys of a thread in a part
  static constexpr int kPart = kTeams * kKeys;
  static constexpr int kStageBytes = 2 * kKeys * kWords * kThreads * 16;
  static constexpr int kColumns = 8 * kLanes;

  /// Sums relative to the largest score, and that score and the sum of exponentials.
  template <int kCount>
  struct Sums {
    float value[kCount][kHeads][kColumns];
    float2 softmax[kCount][kHeads];
  };
  struct Shared {
    Sums<kWarps> warps;
    Sums<kMostShares> shares;
  };
  static constexpr int shared_bytes(int stages) { return stages * kStageBytes + static_cast<int>(sizeof(Shared)); }
  static_assert(shared_bytes(kLeastStages) <= kSharedMemory);
};

/// Shares of a sequence of `positions` positions, at most `parts`.
__device__ __forceinline__ int shares_of(int positions, int parts) {
  int shares = 1;
  while (shares < kMostShares && positions > shares * kSharePositions && 2 * shares <= parts) shares *= 2;
  return shares;
}

/// Successive parts of a block: share by share, of a share every `shares`-th part.
struct PartOfBlock {
  int part, share, parts, shares, blocks;

  __device__ __forceinline__ bool valid() const { return share < shares; }
  __device__ __forceinline__ bool last_of_share() const { return part + shares >= parts; }
  __device__ __forceinline__ void advance() {
    part += shares;
    if (part < parts) return;
    share += blocks;
    part = share;
  }
};

constexpr float kLog2OfE = 1.44269504f;  // scores are in units of ln 2: their exponentials are powers of 2

/// Column c of head h of `count` sums, joined in their order.
struct Joined {
  float largest = -FLT_MAX, total = 0.0f, value = 0.0f;

  template <class Sums>
  __device__ __forceinline__ Joined(const Sums& sums, int count, int h, int c) {
#pragma unroll 4
    for (int i = 0; i < count; ++i) largest = fmaxf(largest, sums.softmax[i][h].x);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const float factor = exp2f(sums.softmax[i][h].x - largest);
      total += sums.softmax[i][h].y * factor;
      value += sums.value[i][h][c] * factor;
    }
  }
};

/// Where the keys or the values of a sequence are, for one thread's columns. kBytes: of an element.
template <int kBytes>
struct KeyRows {
  char *fresh, *prefix, *own;  ///< the new row; the cache
  std::int64_t stride;         ///< bytes
  int in_prefix;               ///< positions of the first part

  __device__ __forceinline__ KeyRows(const AnyMatrix& new_rows, const AnyMatrix& cache, int row,
                                     const CachedSequence& sequence, std::int64_t column)
      : stride(cache.stride * kBytes), in_prefix(sequence.prefix) {
    fresh = static_cast<char*>(new_rows.data) + (row * new_rows.stride + column) * kBytes;
    char* const first = static_cast<char*>(cache.data) + column * kBytes;
    prefix = first + sequence.prefix_begin * stride;
    own = first + (sequence.own_begin - in_prefix) * stride;
  }
  __device__ __forceinline__ char* stored(int key) const { return (key < in_prefix ? prefix : own) + key * stride; }
};

/// Until the oldest of `stages` groups of copies is there.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  switch (stages) {
    case 2:
      return wait_copies<1>();
    case 3:
      return wait_copies<2>();
    case 4:
      return wait_copies<3>();
    default:
      return wait_copies<4>();
  }
}

extern __shared__ __align__(16) unsigned char attention_memory[];

template <class Tile>
__global__ void __launch_bounds__(kThreads, Tile::kHeads == 1 ? 6 : 3) attend(const __grid_constant__ Arguments a) {
  constexpr int kLanes = Tile::kLanes, kHeads = Tile::kHeads, kTeams = Tile::kTeams, kKeys = Tile::kKeys,
                kWords = Tile::kWords, kBytes = Tile::kBytes;
  constexpr bool kWide = Tile::kWide;
  constexpr Scalar kType = Tile::kType;
  allow_next_kernel();
  const CachedAttention& shape = a.shape;
  const int row = static_cast<int>(blockIdx.z), rank = static_cast<int>(blockIdx.x),
            thread = static_cast<int>(threadIdx.x);
  const int size = static_cast<int>(shape.head_size), group = static_cast<int>(shape.heads / shape.kv_heads);
  const int key_head = static_cast<int>(blockIdx.y) / a.groups, part_of_group = static_cast<int>(blockIdx.y) % a.groups;
  const int first_head = key_head * group + part_of_group * kHeads, heads = min(kHeads, group - part_of_group * kHeads);
  const CachedSequence sequence = shape.sequences[row];
  const int position = __ldcg(shape.positions.data + row);
  const auto store = [&](int h, int c, float value) {
    store_element(a.out.data, kType, row * a.out.stride + std::int64_t{first_head + h} * size + c, value);
  };
  if (position >= sequence.end) {
    await_previous_kernel();  // which may still read `out`
    if (rank == 0)
      for (int i = thread; i < heads * size; i += kThreads) store(i / size, i % size, 0.0f);
    return;
  }
  const int lower = shape.window > 0 && position >= shape.window ? position - static_cast<int>(shape.window) + 1 : 0;
  const int origin = lower / Tile::kPart * Tile::kPart, parts = position / Tile::kPart - lower / Tile::kPart + 1,
            shares = shares_of(position + 1 - lower, parts);
  const bool exchanges = a.blocks > 1 && shares > 1;

  const int lane = thread % kLanes, team = thread / kLanes, warp = thread / kWarp, column = lane * 8;
  const bool active = column < size;
  const std::int64_t key_column = std::int64_t{key_head} * size + (active ? column : 0);
  const KeyRows<kBytes> keys(a.keys, a.cached_keys, row, sequence, key_column),
      values(a.values, a.cached_values, row, sequence, key_column);

  // Words of this thread: [stage][keys, values][kKeys][kWords].
  const auto ring =
      static_cast<std::uint32_t>(__cvta_generic_to_shared(attention_memory)) + static_cast<std::uint32_t>(thread) * 16;
  const auto place = [ring](int stage, int which, int i, int word) {
    return ring + static_cast<std::uint32_t>((((stage * 2 + which) * kKeys + i) * kWords + word) * kThreads * 16);
  };
  const auto key_of = [origin, team](int part, int i) { return origin + part * Tile::kPart + i * kTeams + team; };
  // Stored keys and values of a part. Those outside of the sequence are not read; they count for nothing.
  const auto request = [&](int part, int stage) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = key_of(part, i);
      if (key < lower || key >= position) continue;
      const char *const k = keys.stored(key), *const v = values.stored(key);
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        copy16_async_once(place(stage, 0, i, word), k + 16 * word);
        copy16_async_once(place(stage, 1, i, word), v + 16 * word);
      }
    }
  };
  PartOfBlock here{rank, rank, parts, shares, a.blocks}, ahead = here;
  for (int stage = 0; stage < a.stages; ++stage) {
    if (ahead.valid()) {
      request(ahead.part, stage);
      ahead.advance();
    }
    commit_copies();
  }
  if (exchanges) meet_cluster();  // all blocks exist: their shared memory may be written
  await_previous_kernel();

  // The new key and value, of the team that has this position in the last part.
  uint4 new_key[kWords], new_value[kWords];
  const bool has_new = position % kTeams == team;
  if (has_new)
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      new_key[word] = __ldcg(reinterpret_cast<const uint4*>(keys.fresh) + word);
      new_value[word] = __ldcg(reinterpret_cast<const uint4*>(values.fresh) + word);
    }
  // Of lanes without columns 0; of heads that this block does not have those of the last, which are not stored.
  float query[kHeads][8];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const std::int64_t at =
        row * a.queries.stride + std::int64_t{first_head + min(h, heads - 1)} * size + (active ? column : 0);
    StoredColumns<kWide> stored;
#pragma unroll
    for (int word = 0; word < kWords; ++word)
      stored.word[word] =
          __ldcg(reinterpret_cast<const uint4*>(static_cast<const char*>(a.queries.data) + at * kBytes) + word);
    if (!active) stored = {};
    stored.values(kType, query[h]);
  }

  auto& shared = *reinterpret_cast<typename Tile::Shared*>(attention_memory + a.stages * Tile::kStageBytes);
  auto& of_shares = exchanges ? *in_cluster(&shared.shares, 0) : shared.shares;
  const float scale = shape.scale * kLog2OfE, cap = shape.softcap * kLog2OfE;
  float mixed[kHeads][8] = {}, largest[kHeads], total[kHeads] = {};
#pragma unroll
  for (int h = 0; h < kHeads; ++h) largest[h] = -FLT_MAX;
  for (int stage = 0; here.valid(); here.advance(), stage = stage + 1 == a.stages ? 0 : stage + 1) {
    const int part = here.part;
    wait_for_oldest(a.stages);
    if (part == parts - 1 && has_new) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        if (key_of(part, i) != position) continue;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          store_shared16(place(stage, 0, i, word), new_key[word]);
          store_shared16(place(stage, 1, i, word), new_value[word]);
          if (part_of_group == 0 && active) {
            reinterpret_cast<uint4*>(keys.stored(position))[word] = new_key[word];
            reinterpret_cast<uint4*>(values.stored(position))[word] = new_value[word];
          }
        }
      }
    }
    const auto load = [&](int which, int i, float(&value)[8]) {
      StoredColumns<kWide> stored;
#pragma unroll
      for (int word = 0; word < kWords; ++word) stored.word[word] = load_shared16(place(stage, which, i, word));
      stored.values(kType, value);
    };
    bool read[kKeys];
    float score[kHeads][kKeys], most[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) most[h] = largest[h];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      read[i] = key_of(part, i) >= lower && key_of(part, i) <= position;
      float key[8];
      load(0, i, key);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < 8; ++c) dot += query[h][c] * key[c];
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(kAllLanes, dot, offset);
        dot *= scale;
        if (shape.softcap > 0) dot = cap * hyperbolic_tangent(dot / cap);
        score[h][i] = dot;
        if (read[i]) most[h] = fmaxf(most[h], dot);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int offset = kLanes; offset < kWarp; offset *= 2)
        most[h] = fmaxf(most[h], __shfl_xor_sync(kAllLanes, most[h], offset));
      const float factor = exp2f(largest[h] - most[h]);
      largest[h] = most[h];
      total[h] *= factor;
#pragma unroll
      for (int c = 0; c < 8; ++c) mixed[h][c] *= factor;
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (!read[i]) continue;
      float value[8];
      load(1, i, value);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float probability = exp2f(score[h][i] - largest[h]);
        total[h] += probability;
#pragma unroll
        for (int c = 0; c < 8; ++c) mixed[h][c] += probability * value[c];
      }
    }
    if (ahead.valid()) {
      request(ahead.part, stage);
      ahead.advance();
    }
    commit_copies();
    if (!here.last_of_share()) continue;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int offset = kLanes; offset < kWarp; offset *= 2) {
        total[h] += __shfl_xor_sync(kAllLanes, total[h], offset);
#pragma unroll
        for (int c = 0; c < 8; ++c) mixed[h][c] += __shfl_xor_sync(kAllLanes, mixed[h][c], offset);
      }
      if (thread % kWarp < kLanes)
#pragma unroll
        for (int c = 0; c < 8; ++c) shared.warps.value[warp][h][column + c] = mixed[h][c];
      if (thread % kWarp == 0) shared.warps.softmax[warp][h] = make_float2(largest[h], total[h]);
      largest[h] = -FLT_MAX;
      total[h] = 0.0f;
#pragma unroll
      for (int c = 0; c < 8; ++c) mixed[h][c] = 0.0f;
    }
    __syncthreads();
    for (int i = thread; i < heads * size; i += kThreads) {
      const int h = i / size, c = i % size;
      const Joined joined(shared.warps, kWarps, h, c);
      if (shares == 1) {
        store(h, c, joined.value / joined.total);
        continue;
      }
      of_shares.value[here.share][h][c] = joined.value;
      if (c == 0) of_shares.softmax[here.share][h] = make_float2(joined.largest, joined.total);
    }
    __syncthreads();  // the sums of the warps have been read
  }
  if (shares == 1) return;
  if (exchanges) sync_cluster();
  if (rank != 0) return;
  for (int i = thread; i < heads * size; i += kThreads) {
    const Joined joined(shared.shares, shares, i / size, i % size);
    store(i / size, i % size, joined.value / joined.total);
  }
}

constexpr std::int64_t kReservedShared = 1024;  ///< bytes that the driver takes of each block's
std::int64_t shared_bytes_of_multiprocessor() {
  static const std::int64_t all = [] {
    int device = 0, bytes = 0;
    require(cudaGetDevice(&device), "cudaGetDevice");
    require(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
            "cudaDeviceGetAttribute");
    return bytes;
  }();
  return all;
}

/// The largest number of stages with which all blocks are resident. The fewer blocks there are, the more copies each
/// must have in flight to use the bandwidth.
template <class Tile>
int stages_for(std::int64_t blocks) {
  const std::int64_t each = blocks_for(blocks, multiprocessors());
  int stages = kMostStages;
  while (stages > kLeastStages &&
         (Tile::shared_bytes(stages) > kSharedMemory ||
          (Tile::shared_bytes(stages) + kReservedShared) * each > shared_bytes_of_multiprocessor()))
    --stages;
  return stages;
}

template <int kLanes, int kHeads, Scalar kType>
void launch(const Execution& execution, Arguments& arguments) {
  using ThisTile = Tile<kLanes, kHeads, kType>;
  static const bool once = [] {
    require(cudaFuncSetAttribute(attend<ThisTile>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemory),
            "cached_attention: shared memory");
    return true;
  }();
  static_cast<void>(once);
  const CachedAttention& shape = arguments.shape;
  arguments.groups = static_cast<int>((shape.heads / shape.kv_heads + kHeads - 1) / kHeads);
  const std::int64_t heads = shape.kv_heads * arguments.groups, rows = shape.sequences.size;
  arguments.blocks = 1;
  while (has_clusters() && arguments.blocks < kMostShares && 2 * arguments.blocks * heads * rows <= multiprocessors())
    arguments.blocks *= 2;
  arguments.stages = stages_for<ThisTile>(arguments.blocks * heads * rows);
  launch_early<Arguments>(
      execution, "cached_attention", attend<ThisTile>,
      dim3(static_cast<unsigned>(arguments.blocks), static_cast<unsigned>(heads), static_cast<unsigned>(rows)),
      kThreads, ThisTile::shared_bytes(arguments.stages), arguments.blocks, arguments);
}

template <int kLanes, Scalar kType>
void launch(const Execution& execution, Arguments& arguments) {
  if (arguments.shape.heads == arguments.shape.kv_heads) return launch<kLanes, 1, kType>(execution, arguments);
  launch<kLanes, 4, kType>(execution, arguments);
}

template <Scalar kType>
void launch(const Execution& execution, Arguments& arguments) {
  const std::int64_t size = arguments.shape.head_size;
  if (size <= 32) return launch<4, kType>(execution, arguments);
  if (size <= 64) return launch<8, kType>(execution, arguments);
  if (size <= 128) return launch<16, kType>(execution, arguments);
  launch<32, kType>(execution, arguments);
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
  Arguments arguments{shape, queries, keys, values, cached_keys, cached_values, out, 1, 1, kLeastStages};
  if (queries.type == Scalar::fp32) return launch<Scalar::fp32>(execution, arguments);
  if (queries.type == Scalar::bf16) return launch<Scalar::bf16>(execution, arguments);
  launch<Scalar::fp16>(execution, arguments);
}

}  // namespace cuda
}  // namespace weft::kernels
