// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. The keys and values of a sequence are read once, or as often as a key head has groups of four query
// heads: 2 * positions * kv_heads * head_size elements per row.
//
// The positions of a sequence are divided into parts of 128, and one block of threads forms the softmax of one part for
// up to four query heads that share a key head: few rows also fill the GPU. Some lanes (a power of two) share a key,
// with eight columns each. The block that finishes last joins the parts in their order; the counter by which it knows
// is 0 again afterwards. The new row is read where it came from, since another block may be storing it.
#include <cfloat>

#include "kernels/language/attention/attention.hpp"
#include "kernels/language/decode/cached_attention.hpp"
#include "kernels/language/exponential.hpp"
#include "kernels/matrix_cuda.cuh"
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
  int blocks;  ///< of query heads per key head
};

/// Eight columns, which other blocks read as well: stays in the second-level cache.
__device__ __forceinline__ void load8(const AnyMatrix& matrix, std::int64_t row, std::int64_t column,
                                      float (&value)[8]) {
  const std::int64_t at = row * matrix.stride + column;
  if (matrix.type == Scalar::fp32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(matrix.data) + at);
    const float4 a = from[0], b = from[1];
    value[0] = a.x, value[1] = a.y, value[2] = a.z, value[3] = a.w;
    value[4] = b.x, value[5] = b.y, value[6] = b.z, value[7] = b.w;
  } else {
    unpack8(matrix.type, *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(matrix.data) + at), value);
  }
}

template <int kLanes, int kHeads>
__global__ void __launch_bounds__(kThreads) attend(const __grid_constant__ Arguments a) {
  constexpr int kTeams = kThreads / kLanes;  // keys at a time
  const CachedAttention& shape = a.shape;
  const int row = static_cast<int>(blockIdx.z), part = static_cast<int>(blockIdx.x),
            thread = static_cast<int>(threadIdx.x);
  const int size = static_cast<int>(shape.head_size), group = static_cast<int>(shape.heads / shape.kv_heads);
  const int key_head = static_cast<int>(blockIdx.y) / a.blocks, block = static_cast<int>(blockIdx.y) % a.blocks;
  const int first_head = key_head * group + block * kHeads, heads = min(kHeads, group - block * kHeads);
  const CachedSequence sequence = shape.sequences[row];
  const int position = shape.positions[row];
  if (position >= sequence.end) {
    if (part == 0)
      for (int i = thread; i < heads * size; i += kThreads)
        store_element(a.out.data, a.out.type, row * a.out.stride + first_head * size + i, 0.0f);
    return;
  }
  const int lower = shape.window > 0 && position >= shape.window ? position - static_cast<int>(shape.window) + 1 : 0;
  const int first_part = lower / kPart, last_part = position / kPart;
  if (part < first_part || part > last_part) return;
  const int origin = part * kPart, begin = max(lower, origin), end = min(position + 1, origin + kPart);

  const int lane = thread % kLanes, team = thread / kLanes, column = lane * 8;
  const bool active = column < size;
  const std::int64_t key_column = std::int64_t{key_head} * size + column;
  if (block == 0 && position < end && team == 0 && active) {
    float fresh[8];
    const std::int64_t to = sequence.row(position);
    load8(a.keys, row, key_column, fresh);
    store_columns(a.cached_keys, to, key_column, fresh);
    load8(a.values, row, key_column, fresh);
    store_columns(a.cached_values, to, key_column, fresh);
  }

  __shared__ float score[kHeads][kPart];
  __shared__ float largest[kHeads], total[kHeads];
  __shared__ float joined[kWarps][kHeads][kLanes * 8];

  float query[kHeads][8] = {};
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
    if (h < heads && active) load8(a.queries, row, std::int64_t{first_head + h} * size + column, query[h]);
#pragma unroll 4
  for (int first = 0; first < end - origin; first += kTeams) {
    const int key = origin + first + team;
    const bool read = key >= begin && key < end;
    float k[8] = {};
    if (read && active) {
      if (key == position)
        load8(a.keys, row, key_column, k);
      else
        load8(a.cached_keys, sequence.row(key), key_column, k);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) dot += query[h][i] * k[i];
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(kAllLanes, dot, offset);
      dot *= shape.scale;
      if (shape.softcap > 0) dot = shape.softcap * hyperbolic_tangent(dot / shape.softcap);
      if (lane == 0) score[h][first + team] = read ? dot : -FLT_MAX;
    }
  }
  __syncthreads();
  // A warp per head. Scores of keys that are not read come before `begin` or after `end`.
  for (int h = thread / kWarp; h < kHeads; h += kWarps) {
    float most = -FLT_MAX;
    for (int j = begin - origin + thread % kWarp; j < end - origin; j += kWarp) most = fmaxf(most, score[h][j]);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
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
#pragma unroll 4
  for (int first = 0; first < end - origin; first += kTeams) {
    const int key = origin + first + team;
    if (key < begin || key >= end || !active) continue;
    float v[8];
    if (key == position)
      load8(a.values, row, key_column, v);
    else
      load8(a.cached_values, sequence.row(key), key_column, v);
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
      for (int i = 0; i < 8; ++i) mixed[h][i] += score[h][first + team] * v[i];
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int offset = kLanes; offset < kWarp; offset *= 2)
        mixed[h][i] += __shfl_xor_sync(kAllLanes, mixed[h][i], offset);
      if (thread % kWarp < kLanes) joined[thread / kWarp][h][column + i] = mixed[h][i];
    }
  __syncthreads();
  const auto sum_of_warps = [&](int h, int c) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += joined[w][h][c];
    return sum;
  };
  const auto store = [&](int h, int c, float value) {
    store_element(a.out.data, a.out.type, row * a.out.stride + std::int64_t{first_head + h} * size + c, value);
  };
  if (first_part == last_part) {
    for (int i = thread; i < heads * size; i += kThreads)
      store(i / size, i % size, sum_of_warps(i / size, i % size) / total[i / size]);
    return;
  }

  const std::int64_t n_parts = gridDim.x;
  const auto place = [&](int h, int p) { return (std::int64_t{row} * shape.heads + first_head + h) * n_parts + p; };
  for (int i = thread; i < heads * size; i += kThreads)
    __stcg(a.parts.sums + place(i / size, part) * size + i % size, sum_of_warps(i / size, i % size));
  if (thread < heads) __stcg(a.parts.softmax + place(thread, part), make_float2(largest[thread], total[thread]));
  __threadfence();
  __shared__ bool last;
  __syncthreads();
  if (thread == 0) {
    unsigned* const ready = a.parts.ready + std::int64_t{row} * shape.heads + blockIdx.y;
    last = atomicAdd(ready, 1u) == static_cast<unsigned>(last_part - first_part);
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

template <int kLanes>
void launch(const Execution& execution, Arguments& arguments) {
  const CachedAttention& shape = arguments.shape;
  const std::int64_t group = shape.heads / shape.kv_heads;
  constexpr int kHeads = 4;
  arguments.blocks = static_cast<int>(group == 1 ? 1 : (group + kHeads - 1) / kHeads);
  const dim3 grid(static_cast<unsigned>(parts_of(shape)), static_cast<unsigned>(shape.kv_heads * arguments.blocks),
                  static_cast<unsigned>(shape.sequences.size));
  if (group == 1)
    attend<kLanes, 1><<<grid, kThreads, 0, stream_of(execution)>>>(arguments);
  else
    attend<kLanes, kHeads><<<grid, kThreads, 0, stream_of(execution)>>>(arguments);
  require_launch("cached_attention");
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
  Arguments arguments{shape, queries, keys, values, cached_keys, cached_values, out, Parts(memory, shape), 1};
  if (shape.head_size <= 32) return launch<4>(execution, arguments);
  if (shape.head_size <= 64) return launch<8>(execution, arguments);
  if (shape.head_size <= 128) return launch<16>(execution, arguments);
  launch<32>(execution, arguments);
}

}  // namespace cuda
}  // namespace weft::kernels
