// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. The keys and values of a sequence are read once, or as often as a key head has groups of four query
// heads: 2 * positions * kv_heads * head_size elements per row.
//
// The positions of a sequence are divided into parts of 128, and a block of threads forms the softmax of one part for
// up to four query heads that share a key head. With few rows each part has its own block, so that they fill the GPU;
// with many, a block forms several. Some lanes (a power of two) share a key, with eight columns each. A thread reads
// its keys and values of a part at once, before it needs the first of them. The block that finishes last joins the
// parts in their order; the counter by which it knows is 0 again afterwards. The new row is read where it came from,
// since another block may be storing it.
#include <cfloat>

#include "kernels/language/attention/attention.hpp"
#include "kernels/language/decode/cached_attention.hpp"
#include "kernels/language/exponential.hpp"
#include "kernels/language/rows_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/workspace.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::cached_attention) cached_attention;
}  // namespace portable

namespace cuda {
namespace {

constexpr int kPart = 128;  ///< positions
constexpr int kThreads = 128, kWarps = kThreads / kWarp;

std::int64_t parts_of(const CachedAttention& shape) { return (shape.longest + kPart - 1) / kPart; }

/// Results of the parts, and how many of a head are ready.
struct Parts {
  float* sums;      ///< [rows, heads, parts, head_size], relative to the largest score of the part
  float2* softmax;  ///< [rows, heads, parts]: largest score, sum of exponentials
  unsigned* ready;  ///< [rows, blocks of heads]

  Parts(Workspace& memory, const CachedAttention& shape)
      : ready(memory.take<unsigned>(shape.sequences.size * shape.heads).data) {
    const std::int64_t count = shape.sequences.size * shape.heads * parts_of(shape);
    softmax = memory.take<float2>(count).data;
    sums = memory.take<float>(count * shape.head_size).data;
  }
};

struct Arguments {
  CachedAttention shape;
  AnyMatrix queries, keys, values, cached_keys, cached_values, out;
  Parts parts;
  int n_parts;  ///< of the longest sequence
  int blocks;   ///< of query heads per key head
};

/// Where the keys or the values of a sequence are, for one thread's columns. kBytes: of an element.
template <int kBytes>
struct KeyRows {
  char *fresh, *prefix, *own;  ///< the new row; the cache
  std::int64_t stride;         ///< bytes
  int position, in_prefix;     ///< of the new row; positions of the first part

  __device__ __forceinline__ KeyRows(const AnyMatrix& new_rows, const AnyMatrix& cache, int row, int position_,
                                     const CachedSequence& sequence, std::int64_t column)
      : stride(cache.stride * kBytes), position(position_), in_prefix(sequence.prefix) {
    fresh = static_cast<char*>(new_rows.data) + (row * new_rows.stride + column) * kBytes;
    char* const first = static_cast<char*>(cache.data) + column * kBytes;
    prefix = first + sequence.prefix_begin * stride;
    own = first + (sequence.own_begin - in_prefix) * stride;
  }
  __device__ __forceinline__ char* stored(int key) const { return (key < in_prefix ? prefix : own) + key * stride; }
  __device__ __forceinline__ const char* of(int key) const { return key == position ? fresh : stored(key); }
};

/// Eight columns. Other blocks may read them as well: they stay in the second-level cache.
template <bool kWide>
__device__ __forceinline__ StoredColumns<kWide> load_words(const char* from) {
  StoredColumns<kWide> words;
  words.word[0] = reinterpret_cast<const uint4*>(from)[0];
  if constexpr (kWide) words.word[1] = reinterpret_cast<const uint4*>(from)[1];
  return words;
}

template <bool kWide>
__device__ __forceinline__ void store_words(char* to, const StoredColumns<kWide>& words) {
  reinterpret_cast<uint4*>(to)[0] = words.word[0];
  if constexpr (kWide) reinterpret_cast<uint4*>(to)[1] = words.word[1];
}

template <int kLanes, int kHeads, Scalar kType>
__global__ void __launch_bounds__(kThreads, kHeads == 1 ? 4 : 3) attend(const __grid_constant__ Arguments a) {
  constexpr int kTeams = kThreads / kLanes;  // keys at a time
  constexpr bool kWide = kType == Scalar::fp32;
  constexpr int kBytes = kWide ? 4 : 2;
  // Keys of a thread, and of these those that are read at once.
  constexpr int kKeys = kPart / kTeams, kMostAtOnce = kWide ? 4 : 8,
                kAtOnce = kKeys < kMostAtOnce ? kKeys : kMostAtOnce;
  static_assert(kKeys % kAtOnce == 0);
  allow_next_kernel();
  await_previous_kernel();
  const CachedAttention& shape = a.shape;
  const int row = static_cast<int>(blockIdx.z), thread = static_cast<int>(threadIdx.x);
  const int size = static_cast<int>(shape.head_size), group = static_cast<int>(shape.heads / shape.kv_heads);
  const int key_head = static_cast<int>(blockIdx.y) / a.blocks, block = static_cast<int>(blockIdx.y) % a.blocks;
  const int first_head = key_head * group + block * kHeads, heads = min(kHeads, group - block * kHeads);
  const CachedSequence sequence = shape.sequences[row];
  const int position = shape.positions[row];
  const auto store = [&](int h, int c, float value) {
    store_element(a.out.data, kType, row * a.out.stride + std::int64_t{first_head + h} * size + c, value);
  };
  if (position >= sequence.end) {
    if (blockIdx.x == 0)
      for (int i = thread; i < heads * size; i += kThreads) store(i / size, i % size, 0.0f);
    return;
  }
  const int lower = shape.window > 0 && position >= shape.window ? position - static_cast<int>(shape.window) + 1 : 0;
  const int first_part = lower / kPart, last_part = position / kPart;

  const int lane = thread % kLanes, team = thread / kLanes, column = lane * 8;
  const bool active = column < size;
  const std::int64_t key_column = std::int64_t{key_head} * size + (active ? column : 0);
  const KeyRows<kBytes> keys(a.keys, a.cached_keys, row, position, sequence, key_column),
      values(a.values, a.cached_values, row, position, sequence, key_column);

  __shared__ float score[kHeads][kPart];
  __shared__ float largest[kHeads], total[kHeads];
  __shared__ float joined[kWarps][kHeads][kLanes * 8];
  const auto sum_of_warps = [&](int h, int c) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += joined[w][h][c];
    return sum;
  };
  const auto place = [&](int h, int p) { return (std::int64_t{row} * shape.heads + first_head + h) * a.n_parts + p; };

  // Of lanes without columns 0; of heads that this block does not have those of the last, which are not stored.
  StoredColumns<kWide> stored_query[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const std::int64_t at =
        row * a.queries.stride + std::int64_t{first_head + min(h, heads - 1)} * size + (active ? column : 0);
    stored_query[h] = load_words<kWide>(static_cast<const char*>(a.queries.data) + at * kBytes);
    if (!active) stored_query[h] = {};
  }

  unsigned formed = 0;  // parts by this block
  for (int part = static_cast<int>(blockIdx.x); part <= last_part; part += static_cast<int>(gridDim.x)) {
    if (part < first_part) continue;
    const int origin = part * kPart, begin = max(lower, origin), end = min(position + 1, origin + kPart);
    // Of keys outside of the part, the nearest: they count for nothing, and no branch is between the loads.
    const auto load = [&](StoredColumns<kWide>(&to)[kAtOnce], const KeyRows<kBytes>& from, int first) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        to[i] = load_words<kWide>(from.of(min(max(origin + (first + i) * kTeams + team, begin), end - 1)));
    };
    StoredColumns<kWide> k[kAtOnce], v[kAtOnce];
    load(k, keys, 0);
    load(v, values, 0);
    float query[kHeads][8];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) stored_query[h].values(kType, query[h]);
#pragma unroll
    for (int first = 0; first < kKeys; first += kAtOnce) {
      if (first * kTeams >= end - origin) break;
      if (first > 0) load(k, keys, first);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = (first + i) * kTeams + team;
        const bool read = origin + at >= begin && origin + at < end;
        float key[8];
        k[i].values(kType, key);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          float dot = 0.0f;
#pragma unroll
          for (int c = 0; c < 8; ++c) dot += query[h][c] * key[c];
#pragma unroll
          for (int offset = kLanes / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(kAllLanes, dot, offset);
          if (lane == 0) score[h][at] = read ? dot * shape.scale : 0.0f;
        }
      }
    }
    // The new row goes to the cache. Other blocks do not read it there.
    if (block == 0 && part == last_part && team == 0 && active) {
      store_words(keys.stored(position), load_words<kWide>(keys.fresh));
      store_words(values.stored(position), load_words<kWide>(values.fresh));
    }
    __syncthreads();
    // A warp per head. Only scores of keys that are read become probabilities.
    for (int h = thread / kWarp; h < kHeads; h += kWarps) {
      float most = -FLT_MAX;
      for (int j = begin - origin + thread % kWarp; j < end - origin; j += kWarp) {
        if (shape.softcap > 0) score[h][j] = shape.softcap * hyperbolic_tangent(score[h][j] / shape.softcap);
        most = fmaxf(most, score[h][j]);
      }
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2)
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
      float sum = 0.0f;
      for (int j = begin - origin + thread % kWarp; j < end - origin; j += kWarp) {
        const float probability = exponential(score[h][j] - most);
        score[h][j] = probability;
        sum += probability;
      }
      sum = warp_sum(sum);
      if (thread % kWarp == 0) largest[h] = most, total[h] = sum;
    }
    __syncthreads();
    float mixed[kHeads][8] = {};
#pragma unroll
    for (int first = 0; first < kKeys; first += kAtOnce) {
      if (first * kTeams >= end - origin) break;
      if (first > 0) load(v, values, first);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float value[8];
        v[i].values(kType, value);
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
#pragma unroll
          for (int c = 0; c < 8; ++c) mixed[h][c] += score[h][(first + i) * kTeams + team] * value[c];
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
      for (int c = 0; c < 8; ++c) {
#pragma unroll
        for (int offset = kLanes; offset < kWarp; offset *= 2)
          mixed[h][c] += __shfl_xor_sync(kAllLanes, mixed[h][c], offset);
        if (thread % kWarp < kLanes) joined[thread / kWarp][h][column + c] = mixed[h][c];
      }
    __syncthreads();
    if (first_part == last_part) {
      for (int i = thread; i < heads * size; i += kThreads)
        store(i / size, i % size, sum_of_warps(i / size, i % size) / total[i / size]);
      return;
    }
    for (int i = thread; i < heads * size; i += kThreads)
      __stcg(a.parts.sums + place(i / size, part) * size + i % size, sum_of_warps(i / size, i % size));
    if (thread < heads) __stcg(a.parts.softmax + place(thread, part), make_float2(largest[thread], total[thread]));
    ++formed;
    __syncthreads();  // shared memory is free for the next part
  }
  if (formed == 0) return;

  __threadfence();
  __shared__ bool last;
  __syncthreads();
  if (thread == 0) {
    unsigned* const ready = a.parts.ready + std::int64_t{row} * shape.heads + blockIdx.y;
    last = atomicAdd(ready, formed) + formed == static_cast<unsigned>(last_part - first_part + 1);
    if (last) *ready = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = thread; i < heads * size; i += kThreads) {
    const int h = i / size, c = i % size;
    float most = -FLT_MAX;
    for (int p = first_part; p <= last_part; ++p) most = fmaxf(most, __ldcg(a.parts.softmax + place(h, p)).x);
    float sum = 0.0f, value = 0.0f;
    for (int p = first_part; p <= last_part; ++p) {
      const float2 softmax = __ldcg(a.parts.softmax + place(h, p));
      const float factor = exponential(softmax.x - most);
      sum += softmax.y * factor;
      value += __ldcg(a.parts.sums + place(h, p) * size + c) * factor;
    }
    store(h, c, value / sum);
  }
}

template <int kLanes, Scalar kType>
void launch(const Execution& execution, Arguments& arguments) {
  const CachedAttention& shape = arguments.shape;
  const std::int64_t group = shape.heads / shape.kv_heads;
  constexpr int kHeads = 4;
  arguments.blocks = static_cast<int>(group == 1 ? 1 : (group + kHeads - 1) / kHeads);
  arguments.n_parts = static_cast<int>(parts_of(shape));
  const std::int64_t heads = shape.kv_heads * arguments.blocks;
  // Blocks that share a sequence: some waves of blocks on the GPU. More would only find that there is nothing to do.
  const unsigned sharing =
      blocks_for(std::int64_t{16} * multiprocessors(), heads * shape.sequences.size, parts_of(shape));
  const dim3 grid(sharing, static_cast<unsigned>(heads), static_cast<unsigned>(shape.sequences.size));
  launch_early<Arguments>(execution, "cached_attention",
                          group == 1 ? attend<kLanes, 1, kType> : attend<kLanes, kHeads, kType>, grid, kThreads, 0, 1,
                          arguments);
}

template <Scalar kType>
void launch(const Execution& execution, Arguments& arguments) {
  const std::int64_t size = arguments.shape.head_size;
  if (size <= 32) return launch<4, kType>(execution, arguments);
  if (size <= 64) return launch<8, kType>(execution, arguments);
  if (size <= 128) return launch<16, kType>(execution, arguments);
  launch<32, kType>(execution, arguments);
}

}  // namespace

std::int64_t cached_attention_workspace(const Execution&, const CachedAttention& shape) {
  Workspace measured(nullptr);
  const Parts parts(measured, shape);
  return measured.bytes();
}

void cached_attention(const Execution& execution, const CachedAttention& shape, AnyMatrix queries, AnyMatrix keys,
                      AnyMatrix values, AnyMatrix cached_keys, AnyMatrix cached_values, AnyMatrix out,
                      Array<std::byte> workspace) {
  if (queries.rows == 0) return;
  if (queries.rows > 65535) throw Error(ExitCode::internal, "cached_attention: more than 65,535 rows");
  Workspace memory(workspace.data);
  Arguments arguments{shape, queries, keys, values, cached_keys, cached_values, out, Parts(memory, shape), 0, 1};
  if (queries.type == Scalar::fp32) return launch<Scalar::fp32>(execution, arguments);
  if (queries.type == Scalar::bf16) return launch<Scalar::bf16>(execution, arguments);
  launch<Scalar::fp16>(execution, arguments);
}

}  // namespace cuda
}  // namespace weft::kernels
