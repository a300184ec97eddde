// SPDX-License-Identifier: Apache-2.0
//
// The kernels stand in the order in which a batch passes through them; the class that strings them together is last.
// What only several ranks need stands where they need it, and does nothing to one.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "kernels/bf16.hpp"
#include "kernels/select/select_cuda.hpp"

namespace weft::kernels::cuda {
namespace {

using Count = unsigned long long;  // what integer atomics take

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Of the filter: 4 loads of 16 bytes in flight for each of 1280 threads. Measured equal within 2 %: (4, 2, 3) and (2,
// 4, 3).
constexpr int kInFlight = 2;            // vectors of 16 bytes of each row that a lane loads before it looks at them
constexpr int kShared = 2;              // rows that a warp compares with the same limits
constexpr int kBlocksPerProcessor = 5;  // registers are rationed for so many
constexpr int kBuffer = 64;   // entries of a row that a warp collects in shared memory; beyond, it reads its span again
constexpr int kBins = 2048;   // of a histogram
constexpr int kRounds = 3;    // bits 30..20, 19..9, 8..0 of a key
constexpr int kReplicas = 4;  // histograms of one block: neighbouring lanes often meet in one bin
constexpr unsigned kAll = 0xffffffffu;
constexpr std::uint32_t kUnknown = 0xffffffffu;
constexpr std::uint32_t kInfinity = 0x7f800000u;
/// Six are enough when a tile is the same each time it is made; a graph must not loop for ever when it is not.
constexpr std::uint32_t kMostPasses = 12;
constexpr Count kNoBudget = ~Count{0};

__device__ constexpr int shift_of(int round) { return round == 0 ? 20 : round == 1 ? 9 : 0; }
__device__ constexpr int width_of(int round) { return round == 2 ? 9 : 11; }

/// The bin of a key in a round whose higher bits are `prefix`; -1: not of this round.
__device__ __forceinline__ int bin_of(std::uint32_t key, int round, std::uint32_t prefix) {
  if (key == 0 || (key >> (shift_of(round) + width_of(round))) != prefix) return -1;
  return static_cast<int>((key >> shift_of(round)) & ((1u << width_of(round)) - 1u));
}

__device__ __forceinline__ std::uint32_t key_of(float r) { return r > 0.0f ? __float_as_uint(r) : 0u; }

/// Larger words come first: by key, then by lower index. No two are equal.
__device__ __forceinline__ Count word_of(std::uint32_t key, std::uint32_t index) {
  return static_cast<Count>(key) << 32 | (0xffffffffu - index);
}

/// What a pass over the tiles does for a group.
enum Mode : std::uint32_t {
  kFilter,     // keys above the threshold go into the list
  kHistogram,  // keys of a round are counted by bin
  kCountTies,  // keys equal to the threshold are counted for each token
  kAdmit,      // as kFilter, and of the keys equal to the threshold the first `admit` of each token
  kSettled     // the list is good
};

struct Group {
  std::uint32_t mode;
  std::uint32_t round;   // of the histogram
  std::uint32_t prefix;  // bits of the K-th key that are known
  std::uint32_t kth;     // the K-th key; 0: everything in the list stays
  Count above;           // keys above those of the prefix
  Count budget;
  Count cursor;    // entries that passed the filter, stored or not
  Count room;      // entries equal to the K-th key that stay
  Count ties_cut;  // and that do not
  std::uint32_t ticket;
  std::uint32_t guess;      // several ranks: the threshold of the first pass
  std::uint32_t exhausted;  // several ranks: all of them have fewer keys than the budget
  std::uint32_t unused;
};

/// What ranks add up for a group after the first pass. The sums of halves and of their squares say whether all
/// thresholds were one: n values are equal if and only if n times the sum of squares is the square of the sum.
struct Agreement {
  Count passed;  // entries above the threshold
  Count upper, upper_squared;
  Count lower, lower_squared;
};
constexpr std::int64_t kAgreementCounts = sizeof(Agreement) / sizeof(Count);
/// Beyond, the squares would not fit.
constexpr std::int64_t kMostRanks = 65536;

struct Control {
  std::uint32_t again;  // another pass is needed
  std::uint32_t passes;
  std::uint32_t overflow;
  std::uint32_t failed;
};

/// Sizes and memory, as every kernel sees them.
struct View {
  int n_groups;
  int n_layers;
  int n_blocks;  // feature blocks of a layer
  bool all_layers;
  std::int64_t n_tokens;  // of this batch
  std::int64_t n_features;
  std::int64_t padded_features;  // a multiple of 8
  std::int64_t capacity;         // entries of a group's list
  std::int64_t most;             // entries of a token's list (topk)
  Control* control;
  Group* group;
  std::uint32_t* threshold;  // [groups]
  void* limit;               // [layers, padded features] in the product's type: products at or below cannot pass
  Count* histogram;          // [rounds, groups, bins]
  Count* survey;             // [groups, bins] of a pass over tiles
  std::uint32_t* key;        // [groups, capacity]
  float* value;              // [groups, capacity]
  uint2* segment;            // [tokens, layers, blocks] first entry in the list, entries
  std::uint32_t* above;      // [groups, tokens] entries that stay for certain
  std::uint32_t* tied;       // [groups, tokens] entries equal to the K-th key
  std::uint32_t* admit;      // [groups, tokens] how many of them stay
  std::uint32_t* used;       // [groups, tokens] how many a pass over the tiles has admitted
  Count* word;               // [tokens, groups, most] best words of a token, descending, then 0 (topk)

  // Of several ranks; `several` is of batch_topk, the others of topk too.
  bool several;
  int n_ranks, n_shards, shard, n_slices, slice;  // all; of the feature axis; of the data axis
  std::uint32_t n_features_total;                 // per layer
  std::uint32_t feature_begin;
  Agreement* agreement;     // [groups]
  std::uint32_t* tie;       // [shards, tokens, layers] entries equal to the K-th key
  std::uint32_t* everyone;  // [groups, tokens] of all shards; of one rank: `tied`
  Count* of_slice;          // [slices + 1, groups] ties of each slice of the batch; last: those no list holds

  __device__ int group_of(int layer) const { return all_layers ? 0 : layer; }
};

struct LayerBias {
  const float* layer[kMostLayers];
};

/// A tile as a kernel sees it. Rows are padded to a multiple of 8 elements; what stands there is arbitrary.
struct Piece {
  const void* data;
  std::int64_t stride;
  std::int64_t rows;
  std::int64_t token_begin;
  std::int64_t feature_begin;
  int columns;
  int layer;
  int block;
  const float* bias;  // of the first column
};

// ---- small tools ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ int warp_exclusive(int value, int lane, int& total) {
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(kAll, sum, step);
    if (lane >= step) sum += other;
  }
  total = __shfl_sync(kAll, sum, 31);
  return sum - value;
}

/// Sum over the threads before this one, and over all in `total`. Every thread of a block of whole warps calls it.
__device__ Count block_exclusive(Count value, Count& total) {
  __shared__ Count of_warp[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = blockDim.x >> 5;
  Count sum = value;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const Count other = __shfl_up_sync(kAll, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    Count part = lane < n_warps ? of_warp[lane] : 0;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const Count other = __shfl_up_sync(kAll, part, step);
      if (lane >= step) part += other;
    }
    of_warp[lane] = part;
  }
  __syncthreads();
  total = of_warp[31];
  return (warp > 0 ? of_warp[warp - 1] : 0) + sum - value;
}

struct Picked {
  int bin;      // the highest bin such that it and those above hold at least `rank` keys; -1: all hold fewer
  Count above;  // keys in the bins above it
  Count in;     // keys in it
};

/// All threads of the block call it and get the same.
__device__ Picked pick(const Count* histogram, Count rank) {
  __shared__ Picked result;
  const int per = kBins / blockDim.x;
  if (threadIdx.x == 0) result = {-1, 0, 0};
  Count own = 0;
  for (int i = 0; i < per; ++i) own += __ldcg(histogram + kBins - 1 - (threadIdx.x * per + i));
  Count total;
  Count before = block_exclusive(own, total);
  if (before < rank && before + own >= rank) {
    for (int i = 0; i < per; ++i) {
      const int bin = kBins - 1 - (static_cast<int>(threadIdx.x) * per + i);
      const Count in = __ldcg(histogram + bin);
      if (before + in >= rank) {
        result = {bin, before, in};
        break;
      }
      before += in;
    }
  }
  __syncthreads();
  const Picked copy = result;
  __syncthreads();
  return copy;
}

/// 16 bytes of products.
template <class T>
struct Vector;

template <>
struct Vector<bf16> {
  static constexpr int kSize = 8;
  static __device__ __forceinline__ float get(const uint4& x, int i) {
    const std::uint32_t word = i / 2 == 0 ? x.x : i / 2 == 1 ? x.y : i / 2 == 2 ? x.z : x.w;
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
  static __device__ __forceinline__ std::uint32_t greater(std::uint32_t x, std::uint32_t y) {
    return __hgt2_mask(*reinterpret_cast<const __nv_bfloat162*>(&x), *reinterpret_cast<const __nv_bfloat162*>(&y));
  }
  /// Whether any element is greater than its limit.
  static __device__ __forceinline__ bool any(const uint4& x, const uint4& limit) {
    return (greater(x.x, limit.x) | greater(x.y, limit.y) | greater(x.z, limit.z) | greater(x.w, limit.w)) != 0;
  }
  /// The largest value of the type that is not above c.
  static __device__ __forceinline__ bf16 below(float c) {
    const std::uint32_t bits = __float_as_uint(c);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7f80};  // not a number: nothing can pass
    return {static_cast<std::uint16_t>(((bits >> 31) != 0 ? bits + 0xffffu : bits) >> 16)};
  }
  static __device__ __forceinline__ bf16 nothing() { return {0x7f80}; }
  static __device__ __forceinline__ std::uint32_t nothing_word() { return 0x7f807f80u; }
};

template <>
struct Vector<float> {
  static constexpr int kSize = 4;
  static __device__ __forceinline__ float get(const uint4& x, int i) {
    return __uint_as_float(i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w);
  }
  static __device__ __forceinline__ bool any(const uint4& x, const uint4& limit) {
    return __uint_as_float(x.x) > __uint_as_float(limit.x) || __uint_as_float(x.y) > __uint_as_float(limit.y) ||
           __uint_as_float(x.z) > __uint_as_float(limit.z) || __uint_as_float(x.w) > __uint_as_float(limit.w);
  }
  static __device__ __forceinline__ float below(float c) { return c == c ? c : __uint_as_float(kInfinity); }
  static __device__ __forceinline__ float nothing() { return __uint_as_float(kInfinity); }
  static __device__ __forceinline__ std::uint32_t nothing_word() { return kInfinity; }
};

// ---- before a pass -------------------------------------------------------------------------------------------------

/// Limits for the filter, and with `first` the state of a new batch.
///
/// fp32(product + bias) > threshold implies product > threshold - bias exactly (rounding is monotone and the threshold
/// is a float), so product > limit for any limit that is not above the difference. The few that pass falsely are seen
/// when the sum is made.
template <class T>
__global__ void __launch_bounds__(kThreads) begin_pass(View view, LayerBias bias, bool first, Count budget, bool relu) {
  const std::int64_t thread = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
  const std::int64_t n_threads = gridDim.x * static_cast<std::int64_t>(kThreads);
  if (first) {
    for (std::int64_t i = thread; i < kRounds * view.n_groups * kBins; i += n_threads) view.histogram[i] = 0;
    if (thread < view.n_groups) {
      Group& group = view.group[thread];
      group = {};
      group.budget = budget;
    }
    if (thread == 0) *view.control = {0, 1, 0, 0};
    if (view.several)
      for (std::int64_t i = thread; i < (view.n_slices + 1) * view.n_groups; i += n_threads) view.of_slice[i] = 0;
    if (view.n_features == 0 && view.word != nullptr) {  // a shard without tiles: nobody else writes its lists
      const std::int64_t lists = view.n_groups * view.n_tokens;
      for (std::int64_t i = thread; i < lists; i += n_threads) view.above[i] = view.admit[i] = 0;
      for (std::int64_t i = thread; i < lists * view.most; i += n_threads) view.word[i] = 0;
    }
  } else if (thread == 0) {
    ++view.control->passes;
  }
  T* limit = static_cast<T*>(view.limit);
  for (std::int64_t i = thread; i < view.n_layers * view.padded_features; i += n_threads) {
    const int layer = static_cast<int>(i / view.padded_features);
    const std::int64_t feature = i % view.padded_features;
    const int g = view.group_of(layer);
    if (!first && view.group[g].mode != kFilter) continue;
    const std::uint32_t threshold = relu ? 0 : view.threshold[g];
    limit[i] = feature >= view.n_features || threshold >= kInfinity
                   ? Vector<T>::nothing()
                   : Vector<T>::below(__fsub_rd(__uint_as_float(threshold), bias.layer[layer][feature]));
  }
}

/// What an entry must exceed. relu has no threshold, whatever stands in the controller's state; there a key beyond
/// infinity lets nothing pass.
__device__ __forceinline__ float threshold_of(const View& view, int g, bool relu) {
  return relu ? 0.0f : __uint_as_float(min(view.threshold[g], kInfinity));
}

// ---- the pass over a tile ------------------------------------------------------------------------------------------

/// Entries of a span of one row that exceed the threshold, one warp. `visit(ballot of passing lanes, own passes,
/// column, r)`.
template <class T, class Visit>
__device__ __forceinline__ void scan_span(const T* row, const float* bias, int begin, int end, float threshold,
                                          int lane, Visit&& visit) {
  for (int first = begin; first < end; first += 32) {
    const int at = first + lane;
    const float r = at < end ? static_cast<float>(row[at]) + bias[at] : 0.0f;
    visit(__ballot_sync(kAll, r > threshold), r > threshold, at, r);
  }
}

/// What exceeds the threshold goes into the list. kWarpsPerRow warps share kShared rows, each with a span of columns of
/// its own; the block reserves room for all its rows at once. The loop only compares with the limits, which serve all
/// shared rows; biases are added afterwards to the few that passed. Reads the tile once: the limit is memory.
template <class T, int kWarpsPerRow>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) filter_tile(View view, Piece piece, bool relu) {
  using V = Vector<T>;
  constexpr int kRows = kWarps / kWarpsPerRow * kShared;
  __shared__ uint2 buffer[kWarps][kShared][kBuffer];
  __shared__ int count[kRows][kWarpsPerRow];
  __shared__ Count base;
  const int g = view.group_of(piece.layer);
  if (view.group[g].mode != kFilter) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % kWarpsPerRow;
  const int first_row = warp / kWarpsPerRow * kShared;  // of the block's
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(kRows) + first_row;
  const float threshold = threshold_of(view, g, relu);
  const int vectors = (piece.columns + V::kSize - 1) / V::kSize;
  const int span = ((vectors + kWarpsPerRow - 1) / kWarpsPerRow + 31) / 32 * 32;
  const int begin = min(vectors, part * span), end = min(vectors, begin + span);
  const T* products = static_cast<const T*>(piece.data) + row * piece.stride;
  const uint4* limits = reinterpret_cast<const uint4*>(static_cast<const T*>(view.limit) +
                                                       piece.layer * view.padded_features + piece.feature_begin);
  int n[kShared] = {};
  for (int first = begin; first < end; first += 32 * kInFlight) {
    uint4 x[kShared][kInFlight], limit[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + i * 32 + lane;
      const std::uint32_t nothing = V::nothing_word();
      limit[i] = at < end ? __ldg(limits + at) : make_uint4(nothing, nothing, nothing, nothing);
    }
#pragma unroll
    for (int r = 0; r < kShared; ++r)
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int at = first + i * 32 + lane;
        const uint4* line = reinterpret_cast<const uint4*>(products + r * piece.stride);
        // Beyond the end: not a number, which exceeds no limit.
        x[r][i] = at < end && row + r < piece.rows ? __ldcs(line + at) : make_uint4(kAll, kAll, kAll, kAll);
      }
#pragma unroll
    for (int r = 0; r < kShared; ++r)
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const bool hit = V::any(x[r][i], limit[i]);
        if (!__any_sync(kAll, hit)) continue;
        std::uint32_t above = 0;
        if (hit) {
#pragma unroll
          for (int j = 0; j < V::kSize; ++j) above |= V::get(x[r][i], j) > V::get(limit[i], j) ? 1u << j : 0u;
        }
        // Mostly one lane has one; then the vote says where it goes.
        const unsigned voters = __ballot_sync(kAll, above != 0);
        int total = __popc(voters);
        int to = n[r] + __popc(voters & ((1u << lane) - 1));
        if (__any_sync(kAll, (above & (above - 1)) != 0)) to = n[r] + warp_exclusive(__popc(above), lane, total);
        n[r] += total;
        const int column = (first + i * 32 + lane) * V::kSize;
#pragma unroll
        for (int j = 0; j < V::kSize; ++j)
          if (above >> j & 1) {
            if (to < kBuffer) buffer[warp][r][to] = make_uint2(column + j, __float_as_uint(V::get(x[r][i], j)));
            ++to;
          }
      }
  }
  // What passed the limits: add the bias and look again. A crowded span is counted by reading it once more.
  constexpr int kChunks = kBuffer / 32;
  bool crowded[kShared];
  uint2 entry[kShared][kChunks];
  unsigned passing[kShared][kChunks] = {};
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kShared; ++r) {
    crowded[r] = n[r] > kBuffer;
    int left = 0;
    if (crowded[r]) {
      if (row + r < piece.rows)
        scan_span(products + r * piece.stride, piece.bias, begin * V::kSize, min(end * V::kSize, piece.columns),
                  threshold, lane, [&](unsigned voters, bool, int, float) { left += __popc(voters); });
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const bool in_use = c * 32 + lane < n[r];
        entry[r][c] = in_use ? buffer[warp][r][c * 32 + lane] : make_uint2(0, 0);
        const float sum = in_use ? __uint_as_float(entry[r][c].y) + __ldg(piece.bias + entry[r][c].x) : 0.0f;
        entry[r][c].y = __float_as_uint(sum);
        passing[r][c] = __ballot_sync(kAll, in_use && sum > threshold);
        left += __popc(passing[r][c]);
      }
    }
    if (lane == 0) count[first_row + r][part] = left;
  }
  __syncthreads();
  if (warp == 0) {
    constexpr int kCounts = kRows * kWarpsPerRow;
    int total;
    const int own = lane < kCounts ? (&count[0][0])[lane] : 0;
    const int before = warp_exclusive(own, lane, total);
    __syncwarp();
    if (lane < kCounts) (&count[0][0])[lane] = before;
    Count start = 0;
    if (lane == 0) start = atomicAdd(&view.group[g].cursor, static_cast<Count>(total));
    start = __shfl_sync(kAll, start, 0);
    const bool fits = start + total <= static_cast<Count>(view.capacity);
    if (lane == 0) base = fits ? start : ~Count{0};
    // Lane q * kWarpsPerRow ends where lane (q + 1) * kWarpsPerRow begins.
    const int after = __shfl_down_sync(kAll, before, kWarpsPerRow % 32);
    const int entries = (lane + kWarpsPerRow < kCounts ? after : total) - before;
    const std::int64_t own_row = blockIdx.x * static_cast<std::int64_t>(kRows) + lane / kWarpsPerRow;
    if (lane < kCounts && lane % kWarpsPerRow == 0 && own_row < piece.rows)
      view.segment[((piece.token_begin + own_row) * view.n_layers + piece.layer) * view.n_blocks + piece.block] =
          make_uint2(static_cast<std::uint32_t>(g * view.capacity + static_cast<std::int64_t>(start) + before),
                     fits ? static_cast<std::uint32_t>(entries) : 0u);
  }
  __syncthreads();
  if (base == ~Count{0}) return;
  const std::uint32_t key_base = static_cast<std::uint32_t>(piece.layer * view.n_features + piece.feature_begin);
#pragma unroll
  for (int r = 0; r < kShared; ++r) {
    std::int64_t to = g * view.capacity + static_cast<std::int64_t>(base) + count[first_row + r][part];
    const unsigned lower = (1u << lane) - 1;
    if (!crowded[r]) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (passing[r][c] >> lane & 1) {
          const std::int64_t place = to + __popc(passing[r][c] & lower);
          view.key[place] = key_base + entry[r][c].x;
          view.value[place] = __uint_as_float(entry[r][c].y);
        }
        to += __popc(passing[r][c]);
      }
    } else if (row + r < piece.rows) {
      scan_span(products + r * piece.stride, piece.bias, begin * V::kSize, min(end * V::kSize, piece.columns),
                threshold, lane, [&](unsigned voters, bool passes, int column, float sum) {
                  const std::int64_t place = to + __popc(voters & lower);
                  if (passes) {
                    view.key[place] = key_base + column;
                    view.value[place] = sum;
                  }
                  to += __popc(voters);
                });
    }
  }
}

/// The passes that are not the rule: histograms, counts of ties, admission of ties. A warp takes whole rows.
template <class T>
__global__ void __launch_bounds__(kThreads) survey_tile(View view, Piece piece) {
  __shared__ std::uint32_t bins[kBins];
  const int g = view.group_of(piece.layer);
  Group& group = view.group[g];
  const std::uint32_t mode = group.mode;
  if (mode == kFilter || mode == kSettled) return;
  const int lane = threadIdx.x & 31;
  const std::uint32_t threshold = view.threshold[g], prefix = group.prefix;
  const int round = static_cast<int>(group.round);
  if (mode == kHistogram) {
    for (int b = threadIdx.x; b < kBins; b += kThreads) bins[b] = 0;
    __syncthreads();
  }
  const std::uint32_t key_base = static_cast<std::uint32_t>(piece.layer * view.n_features + piece.feature_begin);
  for (std::int64_t row = blockIdx.x * static_cast<std::int64_t>(kWarps) + threadIdx.x / 32; row < piece.rows;
       row += gridDim.x * static_cast<std::int64_t>(kWarps)) {
    const T* product = static_cast<const T*>(piece.data) + row * piece.stride;
    const std::int64_t token = piece.token_begin + row;
    const auto key_at = [&](int at) {
      return at < piece.columns ? key_of(static_cast<float>(product[at]) + piece.bias[at]) : 0u;
    };
    if (mode == kHistogram) {
      for (int at = lane; at < piece.columns; at += 32) {
        const int bin = bin_of(key_at(at), round, prefix);
        if (bin >= 0) atomicAdd(&bins[bin], 1u);
      }
      continue;
    }
    int above = 0, tied = 0;
    for (int at = lane; at < piece.columns; at += 32) {
      const std::uint32_t key = key_at(at);
      above += key > threshold;
      tied += key == threshold;
    }
    above = __reduce_add_sync(kAll, above);
    tied = __reduce_add_sync(kAll, tied);
    const std::int64_t place = g * view.n_tokens + token;
    if (mode == kCountTies) {
      if (lane == 0) view.tied[place] += tied;
      continue;
    }
    int room = static_cast<int>(min(view.admit[place] - view.used[place], static_cast<std::uint32_t>(tied)));
    const int entries = above + room;
    Count base = 0;
    if (lane == 0) base = atomicAdd(&group.cursor, static_cast<Count>(entries));
    base = __shfl_sync(kAll, base, 0);
    std::int64_t to = g * view.capacity + static_cast<std::int64_t>(base);
    if (lane == 0) {
      view.used[place] += room;
      view.segment[(token * view.n_layers + piece.layer) * view.n_blocks + piece.block] =
          make_uint2(static_cast<std::uint32_t>(to), static_cast<std::uint32_t>(entries));
    }
    for (int first = 0; first < piece.columns && entries > 0; first += 32) {
      const std::uint32_t key = key_at(first + lane);
      const unsigned before = (1u << lane) - 1;
      const unsigned equal = __ballot_sync(kAll, key == threshold);
      const bool stays = key > threshold || (key == threshold && __popc(equal & before) < room);
      room = max(0, room - __popc(equal));
      const unsigned staying = __ballot_sync(kAll, stays);
      if (stays) {
        view.key[to + __popc(staying & before)] = key_base + first + lane;
        view.value[to + __popc(staying & before)] = __uint_as_float(key);
      }
      to += __popc(staying);
    }
  }
  if (mode == kHistogram) {
    __syncthreads();
    for (int b = threadIdx.x; b < kBins; b += kThreads)
      if (bins[b] != 0) atomicAdd(&view.survey[g * kBins + b], static_cast<Count>(bins[b]));
  }
}

/// What the next pass must do for a group, after this one: filter -> (settled | histograms -> filter | ties -> admit).
__device__ void advance(const View& view, int g) {
  Group& group = view.group[g];
  Count* survey = view.survey + g * static_cast<std::int64_t>(kBins);
  const auto clear_survey = [&] {
    for (int b = threadIdx.x; b < kBins; b += blockDim.x) survey[b] = 0;
  };
  const std::uint32_t mode = group.mode;
  const std::int64_t tokens = g * view.n_tokens;
  __syncthreads();
  if (mode == kFilter) {
    clear_survey();
    if (threadIdx.x == 0) {
      group.mode = kHistogram;
      group.round = 0;
      group.prefix = 0;
      group.above = 0;
    }
  } else if (mode == kHistogram) {
    const int round = static_cast<int>(group.round);
    const Picked picked = pick(survey, group.budget - group.above);
    const Count with = group.above + picked.above + picked.in;  // keys from the bin's lower edge
    const std::uint32_t edge = (group.prefix << width_of(round) | static_cast<std::uint32_t>(max(picked.bin, 0)))
                               << shift_of(round);
    __syncthreads();
    if (picked.bin < 0 || with <= static_cast<Count>(view.capacity)) {
      if (threadIdx.x == 0) {  // fewer positive keys than the budget: take them all
        group.mode = kFilter;
        group.cursor = 0;
        view.threshold[g] = picked.bin < 0 || edge == 0 ? 0 : edge - 1;
      }
    } else if (round + 1 < kRounds) {
      clear_survey();
      if (threadIdx.x == 0) {
        group.prefix = group.prefix << width_of(round) | static_cast<std::uint32_t>(picked.bin);
        group.above += picked.above;
        group.round = round + 1;
      }
    } else {
      for (std::int64_t n = threadIdx.x; n < view.n_tokens; n += blockDim.x) view.tied[tokens + n] = 0;
      if (threadIdx.x == 0) {
        group.mode = kCountTies;
        group.above += picked.above;
        view.threshold[g] = edge;
      }
    }
  } else if (mode == kCountTies) {
    const Count room = group.budget - group.above;
    Count granted = 0;
    for (std::int64_t first = 0; first < view.n_tokens; first += blockDim.x) {
      const std::int64_t n = first + threadIdx.x;
      const Count tied = n < view.n_tokens ? view.tied[tokens + n] : 0;
      Count total;
      const Count before = granted + block_exclusive(tied, total);
      if (n < view.n_tokens) {
        view.admit[tokens + n] = static_cast<std::uint32_t>(before >= room ? 0 : min(tied, room - before));
        view.used[tokens + n] = 0;
      }
      granted += total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      group.mode = kAdmit;
      group.cursor = 0;
      group.ties_cut = granted - room;
    }
  } else if (mode == kAdmit) {
    if (threadIdx.x == 0) group.mode = kSettled;
  }
  __syncthreads();
}

/// Several ranks: what this one found with its threshold, to be added up over all.
__global__ void __launch_bounds__(kMostLayers) tell_pass(View view) {
  const int g = threadIdx.x;
  if (g >= view.n_groups) return;
  const std::uint32_t guess = view.threshold[g];
  const Count upper = guess >> 16, lower = guess & 0xffffu;
  view.group[g].guess = guess;
  view.agreement[g] = {view.group[g].cursor, upper, upper * upper, lower, lower * lower};
}

/// Several ranks: all of them filtered with one threshold, and at least the budget passed. Then nothing at or below it
/// is wanted, however few of the entries are this rank's. Where it does not hold every rank sees to it that its own
/// list reaches down to its own K-th key, which is never above that of all; so the loop over tiles is of one rank.
__device__ bool reached(const View& view, int g) {
  if (!view.several) return false;
  const Agreement& all = view.agreement[g];
  const Count n = static_cast<Count>(view.n_ranks);
  return n * all.upper_squared == all.upper * all.upper && n * all.lower_squared == all.lower * all.lower &&
         all.passed >= view.group[g].budget;
}

/// One block. Says in control->again, and to the loop of a graph when there is one, whether the tiles must be made
/// again.
__global__ void __launch_bounds__(1024) decide(View view, bool relu, bool in_graph, cudaGraphConditionalHandle loop) {
  const int t = threadIdx.x;
  bool open = false;
  if (t < view.n_groups) {
    Group& group = view.group[t];
    if (group.mode == kFilter) {
      const bool fits = group.cursor <= static_cast<Count>(view.capacity);
      if (relu && !fits) view.control->overflow = 1;
      if (relu || (fits && (group.cursor >= group.budget || view.threshold[t] == 0 || reached(view, t))))
        group.mode = kSettled;
    }
    open = group.mode != kSettled;
  }
  if (__syncthreads_or(open))
    for (int g = 0; g < view.n_groups; ++g)
      if (view.group[g].mode != kSettled) advance(view, g);
  const bool unsettled = __syncthreads_or(t < view.n_groups && view.group[t].mode != kSettled) != 0;
  const bool again = unsettled && view.control->passes < kMostPasses;
  if (t == 0) {
    if (unsettled && !again) view.control->failed = 1;
    view.control->again = again;
    if (in_graph) cudaGraphSetConditional(loop, again);
  }
}

// ---- the K-th key and what stays -----------------------------------------------------------------------------------

/// Takes the bin of the K-th key. All threads of a block call it.
__device__ void take_bin(Group& group, const Count* histogram, int round) {
  const std::uint32_t prefix = round == 0 ? 0 : group.prefix;
  const Count above = round == 0 ? 0 : group.above;
  const Picked picked = pick(histogram, group.budget - above);
  if (threadIdx.x != 0) return;
  if (picked.bin < 0) {
    group.exhausted = 1;  // kth = 0: all stay
    return;
  }
  group.prefix = prefix << width_of(round) | static_cast<std::uint32_t>(picked.bin);
  group.above = above + picked.above;
  group.ticket = 0;
  if (round + 1 == kRounds) {
    group.kth = group.prefix;
    group.room = group.budget - group.above;
  }
}

/// One round of the search among a group's candidates. The last block of a group picks the bin; of several ranks
/// `choose_bin` does, from the sum over all. Grid (blocks, groups).
__global__ void __launch_bounds__(512) search(View view, int round) {
  __shared__ std::uint32_t bins[kReplicas][kBins];
  __shared__ bool last;
  const int g = blockIdx.y;
  Group& group = view.group[g];
  const Count n = min(group.cursor, static_cast<Count>(view.capacity));
  if (view.several ? round > 0 && group.exhausted != 0 : n < group.budget) return;  // kth = 0: all stay
  for (int b = threadIdx.x; b < kReplicas * kBins; b += blockDim.x) (&bins[0][0])[b] = 0;
  __syncthreads();
  const std::uint32_t prefix = group.prefix;
  const float* value = view.value + g * view.capacity;
  std::uint32_t* own = bins[threadIdx.x % kReplicas];
  const Count stride = static_cast<Count>(gridDim.x) * blockDim.x;
  constexpr int kAtOnce = 4;
  for (Count i = blockIdx.x * static_cast<Count>(blockDim.x) + threadIdx.x; i < n; i += kAtOnce * stride) {
    std::uint32_t key[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) key[j] = i + j * stride < n ? __float_as_uint(value[i + j * stride]) : 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int bin = bin_of(key[j], round, round == 0 ? 0 : prefix);
      if (bin >= 0) atomicAdd(own + bin, 1u);
    }
  }
  __syncthreads();
  Count* histogram = view.histogram + (static_cast<std::int64_t>(round) * view.n_groups + g) * kBins;
  for (int b = threadIdx.x; b < kBins; b += blockDim.x) {
    std::uint32_t sum = 0;
#pragma unroll
    for (int r = 0; r < kReplicas; ++r) sum += bins[r][b];
    if (sum != 0) atomicAdd(histogram + b, static_cast<Count>(sum));
  }
  if (view.several) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&group.ticket, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  take_bin(group, histogram, round);
}

/// A block a group.
__global__ void __launch_bounds__(512) choose_bin(View view, int round) {
  Group& group = view.group[blockIdx.x];
  if (round > 0 && group.exhausted != 0) return;
  take_bin(group, view.histogram + (static_cast<std::int64_t>(round) * view.n_groups + blockIdx.x) * kBins, round);
}

/// The entries of one token in key order, 32 at a time over its warp. `segment` of an entry is its place among the
/// token's segments. Calls visit(in use, segment, position in the list) with the whole warp.
template <class Visit>
__device__ __forceinline__ void for_each_entry(const View& view, std::int64_t token, int lane, Visit&& visit) {
  const int n_segments = view.n_layers * view.n_blocks;
  const uint2* segments = view.segment + token * n_segments;
  for (int first = 0; first < n_segments; first += 32) {
    const uint2 own = first + lane < n_segments ? segments[first + lane] : make_uint2(0, 0);
    int total;
    const int start = warp_exclusive(static_cast<int>(own.y), lane, total);
    for (int entry = 0; entry < total; entry += 32) {
      const int wanted = entry + lane;
      int at = 0;  // the last segment that starts at or before `wanted`
#pragma unroll
      for (int step = 16; step > 0; step >>= 1) {
        const int other = __shfl_sync(kAll, start, at + step);
        if (other <= wanted) at += step;
      }
      const int from = __shfl_sync(kAll, start, at);
      const std::uint32_t list = __shfl_sync(kAll, own.x, at);
      visit(wanted < total, first + at, list + static_cast<std::uint32_t>(wanted - from));
    }
  }
}

/// Entries above and at the K-th key, for each group and token; of several ranks also those at it for each layer. A
/// warp a token.
__global__ void __launch_bounds__(kThreads) count_entries(View view) {
  extern __shared__ std::uint32_t counters[];  // [warps, groups * 2 + layers of several ranks]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const std::int64_t token = blockIdx.x * static_cast<std::int64_t>(kWarps) + warp;
  if (token >= view.n_tokens) return;
  const int n_counters = view.n_groups * 2 + (view.several ? view.n_layers : 0);
  std::uint32_t* own = counters + warp * n_counters;
  std::uint32_t* of_layer = own + view.n_groups * 2;
  for (int i = lane; i < n_counters; i += 32) own[i] = 0;
  __syncwarp();
  for_each_entry(view, token, lane, [&](bool in_use, int segment, std::uint32_t at) {
    const int g = view.group_of(segment / view.n_blocks);
    const std::uint32_t key = in_use ? __float_as_uint(view.value[at]) : 0;
    const std::uint32_t kth = view.group[in_use ? g : 0].kth;
    const bool above = in_use && key > kth, tied = in_use && key == kth;
    if (view.n_groups == 1) {
      const int a = __popc(__ballot_sync(kAll, above)), b = __popc(__ballot_sync(kAll, tied));
      if (lane == 0) own[0] += a, own[1] += b;
    } else {
      if (above) atomicAdd(own + 2 * g, 1u);
      if (tied) atomicAdd(own + 2 * g + 1, 1u);
    }
    if (view.several && tied) atomicAdd(of_layer + segment / view.n_blocks, 1u);
  });
  __syncwarp();
  for (int g = lane; g < view.n_groups; g += 32) {
    view.above[g * view.n_tokens + token] = own[2 * g];
    view.tied[g * view.n_tokens + token] = own[2 * g + 1];
  }
  if (view.several)
    for (int layer = lane; layer < view.n_layers; layer += 32)
      view.tie[(view.shard * view.n_tokens + token) * view.n_layers + layer] = of_layer[layer];
}

/// Several ranks: ties of all shards for each token, and those of this rank for its slice of the batch. Grid (tokens,
/// groups).
__global__ void __launch_bounds__(kThreads) total_ties(View view) {
  const std::int64_t n = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
  const int g = blockIdx.y;
  std::uint32_t own = 0;
  if (n < view.n_tokens) {
    const int first = view.all_layers ? 0 : g, last = view.all_layers ? view.n_layers : g + 1;
    std::uint32_t all = 0;
    for (int shard = 0; shard < view.n_shards; ++shard)
      for (int layer = first; layer < last; ++layer)
        all += view.tie[(shard * view.n_tokens + n) * view.n_layers + layer];
    view.everyone[g * view.n_tokens + n] = all;
    own = view.tied[g * view.n_tokens + n];
  }
  own = __reduce_add_sync(kAll, own);
  if ((threadIdx.x & 31) == 0 && own > 0) atomicAdd(view.of_slice + view.slice * view.n_groups + g, Count{own});
  // Ties that an overflowing list left out, if the K-th key is the same for all ranks as it was here.
  if (n == 0 && view.threshold[g] == view.group[g].kth && view.group[g].ties_cut > 0)
    atomicAdd(view.of_slice + view.n_slices * view.n_groups + g, view.group[g].ties_cut);
}

/// Of the `left` first ties of a token, in (layer, feature) order over all shards: how many are this rank's.
__device__ Count own_share(const View& view, int g, std::int64_t n, Count left) {
  const int first = view.all_layers ? 0 : g, last = view.all_layers ? view.n_layers : g + 1;
  Count own = 0;
  for (int layer = first; layer < last; ++layer)
    for (int shard = 0; shard < view.n_shards; ++shard) {
      const Count taken = min(left, Count{view.tie[(shard * view.n_tokens + n) * view.n_layers + layer]});
      if (shard == view.shard) own += taken;
      left -= taken;
    }
  return own;
}

/// Where the next batch's filter should stand so that about 1.375 budgets pass. Between the threshold and the K-th
/// value the logarithm of the rank falls about linearly with the value; that line is followed to the wanted rank. One
/// thread.
///
/// Several ranks go by what all of them found in the first pass, so that their thresholds stay the same. When that told
/// nothing, the next one stands a little below the K-th value.
__device__ void set_next_threshold(const View& view, int g) {
  const Group& group = view.group[g];
  const float now = __uint_as_float(view.several ? group.guess : view.threshold[g]);
  const Count candidates =
      view.several ? view.agreement[g].passed : min(group.cursor, static_cast<Count>(view.capacity));
  float next = 0;
  if (view.several && !reached(view, g)) {
    next = 0.95f * __uint_as_float(group.kth);
  } else if (candidates > group.budget) {
    const float kth = __uint_as_float(group.kth);
    const float range = logf(static_cast<float>(candidates) / static_cast<float>(group.budget));
    next = kth - 0.31845f * (kth - now) / fmaxf(range, 1e-6f);
    next = fminf(fmaxf(next, 0.93f * kth), 0.9999f * kth);
  } else if (candidates == group.budget) {
    next = 0.98f * now;
  }
  view.threshold[g] = key_of(next);
}

/// How many of its ties each token may keep: the first `room` in token order, over the slices of the batch and the
/// shards of the features. A block a group.
__global__ void __launch_bounds__(1024) admit_ties(View view) {
  const int g = blockIdx.x;
  Group& group = view.group[g];
  const std::int64_t tokens = g * view.n_tokens;
  Count earlier = 0, total_of_slices = 0;
  if (view.several)
    for (int slice = 0; slice <= view.n_slices; ++slice) {
      const Count ties = view.of_slice[slice * view.n_groups + g];
      if (slice < view.slice) earlier += ties;
      total_of_slices += ties;
    }
  const Count room = group.room - min(group.room, earlier);
  Count granted = 0;
  for (std::int64_t first = 0; first < view.n_tokens; first += blockDim.x) {
    const std::int64_t n = first + threadIdx.x;
    const Count tied = n < view.n_tokens ? view.everyone[tokens + n] : 0;
    Count total;
    const Count before = granted + block_exclusive(tied, total);
    if (n < view.n_tokens) {
      const Count left = before >= room ? 0 : min(tied, room - before);
      Count own = left == tied ? view.tied[tokens + n] : left;
      if (view.several && left > 0 && left < tied) own = own_share(view, g, n, left);  // one token at most
      view.admit[tokens + n] = static_cast<std::uint32_t>(own);
    }
    granted += total;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (view.several) granted = total_of_slices;
    if (granted > group.room)
      group.ties_cut = granted - group.room;
    else if (view.several)
      group.ties_cut = 0;
    if (group.budget != kNoBudget) set_next_threshold(view, g);
  }
}

/// row_offsets from above + admit of all groups. One block.
__global__ void __launch_bounds__(1024) make_offsets(View view, std::int64_t* row_offsets) {
  Count sum = 0;
  for (std::int64_t first = 0; first < view.n_tokens; first += blockDim.x) {
    const std::int64_t n = first + threadIdx.x;
    Count count = 0;
    if (n < view.n_tokens)
#pragma unroll 4
      for (int g = 0; g < view.n_groups; ++g)
        count += view.above[g * view.n_tokens + n] + view.admit[g * view.n_tokens + n];
    Count total;
    const Count before = block_exclusive(count, total);
    if (n < view.n_tokens) row_offsets[n] = static_cast<std::int64_t>(sum + before);
    sum += total;
  }
  if (threadIdx.x == 0) row_offsets[view.n_tokens] = static_cast<std::int64_t>(sum);
}

/// The rows. A warp a token.
__global__ void __launch_bounds__(kThreads) write_rows(View view, SparseActivations out) {
  const int lane = threadIdx.x & 31;
  const std::int64_t token = blockIdx.x * static_cast<std::int64_t>(kWarps) + (threadIdx.x >> 5);
  if (token >= view.n_tokens) return;
  const unsigned before = (1u << lane) - 1;
  std::int64_t to = out.row_offsets[token];
  int last_group = -1;
  std::uint32_t met = 0;  // ties of last_group so far
  for_each_entry(view, token, lane, [&](bool in_use, int segment, std::uint32_t at) {
    const int g = in_use ? view.group_of(segment / view.n_blocks) : view.n_groups;
    const float value = in_use ? view.value[at] : 0.0f;
    const std::uint32_t entry = in_use ? view.key[at] : 0;
    const std::uint32_t key = __float_as_uint(value), kth = view.group[in_use ? g : 0].kth;
    bool stays = in_use && key > kth;
    const bool tied = in_use && key == kth;
    const unsigned ties = __ballot_sync(kAll, tied);
    if (ties != 0) {  // the same for the whole warp
      const unsigned same = __match_any_sync(kAll, g);
      const std::uint32_t rank = __popc(ties & same & before) + (g == last_group ? met : 0);
      if (tied) stays = rank < view.admit[g * view.n_tokens + token];
      // Carry the count of the last tied lane's group: entries ascend by layer, so earlier groups do not come back.
      const int source = 31 - __clz(ties);
      const std::uint32_t counted = rank + 1;
      met = __shfl_sync(kAll, counted, source);
      last_group = __shfl_sync(kAll, g, source);
    }
    const unsigned staying = __ballot_sync(kAll, stays);
    if (stays) {
      const std::int64_t place = to + __popc(staying & before);
      if (place < out.key.size) {
        out.key.data[place] = entry;
        out.value.data[place] = value;
      }
    }
    to += __popc(staying);
  });
}

// ---- topk: the best of each token ----------------------------------------------------------------------------------

/// Sorts the first n words of `words` descending and keeps `budget` of them. All threads of the block call it. Room for
/// the next power of two.
__device__ int keep_largest(Count* words, int n, int budget) {
  __syncthreads();
  constexpr int kRanked = 2 * kThreads;
  if (n <= kRanked) {  // each word finds its rank by comparison with all
    Count own[2];
    int rank[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = threadIdx.x + i * kThreads;
      own[i] = at < n ? words[at] : 0;
      if (at < n)
        for (int j = 0; j < n; ++j) rank[i] += words[j] > own[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (static_cast<int>(threadIdx.x) + i * kThreads < n) words[rank[i]] = own[i];
  } else {
    int size = kRanked;
    while (size < n) size *= 2;
    for (int i = n + threadIdx.x; i < size; i += kThreads) words[i] = 0;
    for (int run = 2; run <= size; run *= 2)
      for (int distance = run / 2; distance > 0; distance /= 2) {
        __syncthreads();
        for (int pair = threadIdx.x; pair < size / 2; pair += kThreads) {
          const int low = pair / distance * 2 * distance + pair % distance, high = low + distance;
          const bool descending = (low & run) == 0;
          const Count a = words[low], b = words[high];
          if ((a < b) == descending) {
            words[low] = b;
            words[high] = a;
          }
        }
      }
  }
  __syncthreads();
  return min(n, budget);
}

/// Merges a tile's rows into the tokens' lists. A block a row; dynamic shared memory: `room` words, a power of two of
/// at least budget + kThreads * 8.
template <class T>
__global__ void __launch_bounds__(kThreads)
    keep_best(View view, Piece piece, bool first_of_group, int budget, int room) {
  using V = Vector<T>;
  extern __shared__ Count words[];
  __shared__ int n_words;
  const int g = view.group_of(piece.layer);
  const std::int64_t row = blockIdx.x, token = piece.token_begin + row, place = g * view.n_tokens + token;
  const uint4* products = reinterpret_cast<const uint4*>(static_cast<const T*>(piece.data) + row * piece.stride);
  const uint4* limits = reinterpret_cast<const uint4*>(static_cast<const T*>(view.limit) +
                                                       piece.layer * view.padded_features + piece.feature_begin);
  const int vectors = (piece.columns + V::kSize - 1) / V::kSize;
  const std::uint32_t index_base = static_cast<std::uint32_t>(
      piece.layer * static_cast<std::int64_t>(view.n_features_total) + view.feature_begin + piece.feature_begin);
  Count* list = view.word + (token * view.n_groups + g) * view.most;
  const int old = first_of_group ? 0 : static_cast<int>(view.above[place]);
  for (int i = threadIdx.x; i < old; i += kThreads) words[i] = list[i];
  if (threadIdx.x == 0) n_words = old;
  __syncthreads();
  const std::uint32_t hint = view.threshold[g] >= kInfinity ? 0 : view.threshold[g];
  // A full list raises the bar to its least word: later entries of equal key lose to it.
  std::uint32_t bar = old == budget ? static_cast<std::uint32_t>(words[budget - 1] >> 32) : hint;
  __syncthreads();

  const auto look = [&](const uint4& x, int at) {
#pragma unroll
    for (int j = 0; j < V::kSize; ++j) {
      const int column = at * V::kSize + j;
      if (column >= piece.columns) continue;
      const float r = V::get(x, j) + __ldg(piece.bias + column);
      if (r > __uint_as_float(bar)) {
        const int to = atomicAdd(&n_words, 1);
        if (to < room) words[to] = word_of(__float_as_uint(r), index_base + column);
      }
    }
  };
  // The limits are made from the hint: they exclude nothing as long as the bar is not below it.
  const bool limited = bar >= hint && view.threshold[g] < kInfinity;
  constexpr int kAtOnce = 4;
  for (int first = 0; first < vectors; first += kThreads * kAtOnce) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kThreads + static_cast<int>(threadIdx.x);
      x[i] = at < vectors ? __ldcs(products + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kThreads + static_cast<int>(threadIdx.x);
      if (at < vectors && (!limited || V::any(x[i], __ldg(limits + at)))) look(x[i], at);
    }
  }
  __syncthreads();
  int n = n_words;
  // Is the hint below the budget-th entry? Only what exceeds it counts: some of the old list may not.
  int counted = n;
  if (old < budget)
    for (int i = old - 1; i >= 0 && static_cast<std::uint32_t>(words[i] >> 32) <= bar; --i) --counted;
  const bool too_many = n > room, too_few = old < budget && counted < budget && bar > 0;
  if (too_many || too_few) {
    // Again, with a look at the list's length after every chunk. Too few: the hint was too high for this token.
    __syncthreads();
    if (too_few) bar = 0;
    if (threadIdx.x == 0) n_words = old;
    for (int i = threadIdx.x; i < old; i += kThreads) words[i] = list[i];
    __syncthreads();
    for (int first = 0; first < vectors; first += kThreads) {
      const bool full = n_words + kThreads * V::kSize > room;  // the same for the whole block
      __syncthreads();
      if (full) {
        const int kept = keep_largest(words, n_words, budget);
        if (threadIdx.x == 0) n_words = kept;
        if (kept == budget) bar = max(bar, static_cast<std::uint32_t>(words[budget - 1] >> 32));
        __syncthreads();
      }
      const int at = first + static_cast<int>(threadIdx.x);
      if (at < vectors) look(products[at], at);
      __syncthreads();
    }
    n = n_words;
  }
  n = keep_largest(words, n, budget);
  for (int i = threadIdx.x; i < budget; i += kThreads) list[i] = i < n ? words[i] : 0;
  if (threadIdx.x == 0) {
    view.above[place] = n;
    view.admit[place] = 0;
  }
}

/// Several shards: of each row of a slice of the tokens the budget-th word among the lists of all; 0 when there are
/// fewer. `lists` [n_lists, rows, most], descending, then 0. A word's rank is its place in its own list and what is
/// greater in the others: no two are equal. A warp a row.
__global__ void __launch_bounds__(kThreads)
    find_cut_offs(const Count* lists, int n_lists, std::int64_t rows, std::int64_t most, int budget, Count* cut_off) {
  const int lane = threadIdx.x & 31;
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(kWarps) + (threadIdx.x >> 5);
  if (row >= rows) return;
  Count found = 0;
  for (int own = 0; own < n_lists; ++own) {
    const Count* list = lists + (own * rows + row) * most;
    for (int i = lane; i < budget && list[i] != 0; i += 32) {
      int rank = i;
      for (int other = 0; other < n_lists && rank < budget; ++other) {
        if (other == own) continue;
        const Count* words = lists + (other * rows + row) * most;
        int begin = 0, end = budget;  // the first word that is not greater
        while (begin < end) {
          const int middle = (begin + end) / 2;
          if (words[middle] > list[i])
            begin = middle + 1;
          else
            end = middle;
        }
        rank += begin;
      }
      if (rank == budget - 1) found = list[i];
    }
  }
  const unsigned holders = __ballot_sync(kAll, found != 0);
  if (holders != 0) found = __shfl_sync(kAll, found, __ffs(static_cast<int>(holders)) - 1);
  if (lane == 0) cut_off[row] = found;
}

/// Several shards: shortens each list to what reaches its cut-off [tokens, groups]. A thread a list.
__global__ void __launch_bounds__(kThreads) cut_lists(View view, const Count* cut_off) {
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
  if (row >= view.n_tokens * view.n_groups) return;
  const std::int64_t token = row / view.n_groups, g = row % view.n_groups;
  std::uint32_t& n = view.above[g * view.n_tokens + token];
  const Count* list = view.word + row * view.most;
  const Count least = cut_off[row];
  std::uint32_t begin = 0, end = n;  // the first word below it
  while (begin < end) {
    const std::uint32_t middle = (begin + end) / 2;
    if (list[middle] >= least)
      begin = middle + 1;
    else
      end = middle;
  }
  n = begin;
}

/// The lists as rows, and a histogram of the least keys of full ones. A block of 128 a token; dynamic shared memory:
/// `budget` indices.
__global__ void __launch_bounds__(128) take_best(View view, int budget, SparseActivations out) {
  extern __shared__ std::uint32_t index[];
  const std::int64_t token = blockIdx.x;
  std::int64_t to = out.row_offsets[token];
  for (int g = 0; g < view.n_groups; ++g) {
    const std::int64_t place = g * view.n_tokens + token;
    const Count* list = view.word + (token * view.n_groups + g) * view.most;
    const int n = static_cast<int>(view.above[place]);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) index[i] = 0xffffffffu - static_cast<std::uint32_t>(list[i]);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      const std::uint32_t own = index[i];
      int rank = 0;
      for (int j = 0; j < n; ++j) rank += index[j] < own;
      if (to + rank < out.key.size) {
        const std::uint32_t layer = own / view.n_features_total;
        const std::uint32_t feature = own - layer * view.n_features_total - view.feature_begin;
        out.key.data[to + rank] = layer * static_cast<std::uint32_t>(view.n_features) + feature;
        out.value.data[to + rank] = __uint_as_float(static_cast<std::uint32_t>(list[i] >> 32));
      }
    }
    if (threadIdx.x == 0) {
      const std::uint32_t least = static_cast<std::uint32_t>(list[budget - 1] >> 32);
      atomicAdd(&view.histogram[g * kBins + (least >> shift_of(0))], Count{1});
    }
    to += n;
  }
}

/// The hint for the next batch: 63 of 64 tokens had their budget-th key above it. A block a group.
__global__ void __launch_bounds__(1024) set_hints(View view) {
  const int g = blockIdx.x;
  const Count n = static_cast<Count>(view.n_tokens);
  const Picked picked = pick(view.histogram + g * static_cast<std::int64_t>(kBins), n - n / 64);
  if (threadIdx.x == 0)
    view.threshold[g] = picked.bin <= 0 ? 0 : (static_cast<std::uint32_t>(picked.bin) << shift_of(0)) - 1;
}

__global__ void set_thresholds(std::uint32_t* threshold, int n, std::uint32_t value) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) threshold[i] = value;
}

// ---- host ----------------------------------------------------------------------------------------------------------

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw Error(ExitCode::internal,
                std::string("selection on the GPU: ") + what + " failed (" + cudaGetErrorString(status) + ")");
}

constexpr std::int64_t round_up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }
constexpr std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

std::int64_t total_features(const SelectionRequest& request) {
  return request.place.n_features_total > 0 ? request.place.n_features_total : request.n_features;
}

/// Sizes that follow from a request.
struct Sizes {
  std::int64_t groups, tile_tokens, tile_features, tile_stride, blocks, padded_features, capacity, most, ranks;

  explicit Sizes(const SelectionRequest& request) {
    groups = request.all_layers || request.rule == SelectionRule::relu ? 1 : request.n_layers;
    tile_tokens = request.tile_tokens > 0 ? std::min(request.tile_tokens, request.n_tokens) : request.n_tokens;
    tile_features = request.tile_features > 0 ? std::min(round_up(request.tile_features, 8), request.n_features)
                                              : request.n_features;
    tile_stride = round_up(tile_features, 8);
    blocks = tile_features > 0 ? divide_up(request.n_features, tile_features) : 0;
    padded_features = round_up(request.n_features, 8);
    const std::int64_t group_entries = request.n_tokens * request.n_features * (request.n_layers / groups);
    ranks = request.place.feature_ranks * request.place.data_ranks;
    // A budget, should all of it be this rank's, and two of its share.
    const std::int64_t wanted = request.budget + divide_up(2 * request.budget, ranks) + 65536;
    capacity = std::min(group_entries, request.rule == SelectionRule::relu ? request.budget : wanted);
    most = 0;
    if (request.rule == SelectionRule::topk) {
      most = request.budget;
      capacity = 0;
    }
  }
};

/// Cuts a workspace into arrays, or only counts its bytes (base null).
class Cutter {
 public:
  explicit Cutter(std::byte* base) : base_(base) {}
  template <class T>
  T* take(std::int64_t n) {
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += round_up(n * static_cast<std::int64_t>(sizeof(T)), 256);
    return at;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::int64_t bytes_ = 0;
};

struct Layout {
  View view{};
  std::byte* tile = nullptr;
  Count* received = nullptr;  // [shards, tokens of a slice, groups, most] the lists of this rank's slice of the tokens
  Count* cut_off = nullptr;   // [tokens, groups]
};

Layout lay_out(const SelectionRequest& request, Cutter& cutter) {
  const Sizes sizes(request);
  const std::int64_t element = bytes_of(request.product);
  const bool topk = request.rule == SelectionRule::topk;
  Layout layout;
  View& view = layout.view;
  view.n_groups = static_cast<int>(sizes.groups);
  view.n_layers = static_cast<int>(request.n_layers);
  view.n_blocks = static_cast<int>(sizes.blocks);
  view.all_layers = sizes.groups == 1 && request.n_layers > 1;
  view.n_tokens = request.n_tokens;
  view.n_features = request.n_features;
  view.padded_features = sizes.padded_features;
  view.capacity = sizes.capacity;
  view.most = sizes.most;
  view.n_ranks = static_cast<int>(sizes.ranks);
  view.n_shards = static_cast<int>(request.place.feature_ranks);
  view.shard = static_cast<int>(request.place.feature_index);
  view.n_slices = static_cast<int>(request.place.data_ranks);
  view.slice = static_cast<int>(request.place.data_index);
  view.several = sizes.ranks > 1 && request.rule == SelectionRule::batch_topk;
  view.n_features_total = static_cast<std::uint32_t>(total_features(request));
  view.feature_begin = static_cast<std::uint32_t>(request.place.feature_begin);
  view.threshold = cutter.take<std::uint32_t>(sizes.groups);
  view.control = cutter.take<Control>(1);
  view.group = cutter.take<Group>(sizes.groups);
  view.limit = cutter.take<std::byte>(request.n_layers * sizes.padded_features * element);
  view.histogram = cutter.take<Count>(kRounds * sizes.groups * kBins);
  view.above = cutter.take<std::uint32_t>(sizes.groups * request.n_tokens);
  view.admit = cutter.take<std::uint32_t>(sizes.groups * request.n_tokens);
  if (topk) {
    view.word = cutter.take<Count>(sizes.groups * request.n_tokens * sizes.most);
    if (view.n_shards > 1) {
      layout.received =
          cutter.take<Count>(view.n_shards * divide_up(request.n_tokens, view.n_shards) * sizes.groups * sizes.most);
      layout.cut_off = cutter.take<Count>(request.n_tokens * sizes.groups);
    }
  } else {
    view.survey = cutter.take<Count>(sizes.groups * kBins);
    view.key = cutter.take<std::uint32_t>(sizes.groups * sizes.capacity);
    view.value = cutter.take<float>(sizes.groups * sizes.capacity);
    view.segment = cutter.take<uint2>(request.n_tokens * request.n_layers * sizes.blocks);
    view.tied = cutter.take<std::uint32_t>(sizes.groups * request.n_tokens);
    view.used = cutter.take<std::uint32_t>(sizes.groups * request.n_tokens);
    view.everyone = view.tied;
    if (view.several) {
      view.agreement = cutter.take<Agreement>(sizes.groups);
      view.tie = cutter.take<std::uint32_t>(view.n_shards * request.n_tokens * request.n_layers);
      view.everyone = cutter.take<std::uint32_t>(sizes.groups * request.n_tokens);
      view.of_slice = cutter.take<Count>((view.n_slices + 1) * sizes.groups);
    }
  }
  layout.tile = cutter.take<std::byte>(sizes.tile_tokens * sizes.tile_stride * element);
  return layout;
}

void check_request(const SelectionRequest& request) {
  const auto refuse = [](const std::string& why) { throw Error(ExitCode::usage, "selection on the GPU: " + why); };
  const SelectionPlace& place = request.place;
  if (place.feature_ranks < 1 || place.data_ranks < 1 || place.feature_index < 0 || place.data_index < 0 ||
      place.feature_index >= place.feature_ranks || place.data_index >= place.data_ranks)
    refuse("a rank must have a place in its grid");
  if (place.feature_ranks * place.data_ranks > kMostRanks) refuse("more than " + std::to_string(kMostRanks) + " ranks");
  if (request.n_tokens < 1 || request.n_layers < 1 || total_features(request) < 1 || request.budget < 1)
    refuse("tokens, layers, features and budget must be positive");
  if (request.n_features < 0 || place.feature_begin < 0 ||
      place.feature_begin + request.n_features > total_features(request))
    refuse("a rank's features must be among all");
  if (request.n_layers > kMostLayers) refuse("more than " + std::to_string(kMostLayers) + " layers");
  if (request.n_layers * total_features(request) > 0xffffffffll) refuse("more than 2^32 features in all layers");
  if (request.product != Scalar::fp32 && request.product != Scalar::bf16) refuse("products must be fp32 or bf16");
  const Sizes sizes(request);
  if (sizes.groups * sizes.capacity > 0xffffffffll) refuse("lists of more than 2^32 entries");
  if (request.rule == SelectionRule::topk && request.budget > kMostPerToken)
    refuse("more than " + std::to_string(kMostPerToken) + " entries of a token in one group");
}

/// Words of shared memory for keep_best: the list, one chunk of products, and a power of two for sorting.
int room_of(std::int64_t budget) {
  int room = 4096;
  while (room < budget + kThreads * 8) room *= 2;
  return room;
}

}  // namespace

struct DeviceSelection::Parts {
  SelectionRequest request;
  SelectionExchange exchange;
  Layout layout;
  cudaStream_t looper = nullptr;  // captures the loop's body
  Control* seen = nullptr;        // pinned

  bool relu() const { return request.rule == SelectionRule::relu; }
  bool topk() const { return request.rule == SelectionRule::topk; }

  template <class Function>
  void with_type(Function&& function) const {
    if (request.product == Scalar::bf16)
      function(bf16{});
    else
      function(float{});
  }

  template <class T, int kWarpsPerRow>
  void launch_filter(const View& view, const Piece& piece, cudaStream_t stream) const {
    const auto blocks = static_cast<unsigned>(divide_up(piece.rows, kWarps / kWarpsPerRow * kShared));
    filter_tile<T, kWarpsPerRow><<<blocks, kThreads, 0, stream>>>(view, piece, relu());
  }

  template <class T>
  void consume(const View& view, const Piece& piece, bool first, std::int64_t budget, cudaStream_t stream) const {
    if (topk()) {
      const int room = room_of(budget);
      const bool first_of_group = piece.block == 0 && (piece.layer == 0 || !view.all_layers);
      const std::size_t bytes = static_cast<std::size_t>(room) * sizeof(Count);
      keep_best<T><<<static_cast<unsigned>(piece.rows), kThreads, bytes, stream>>>(view, piece, first_of_group,
                                                                                   static_cast<int>(budget), room);
      return;
    }
    // Vectors: long enough to keep loads in flight; short enough that a row of many entries, which its warp reads
    // twice, does not keep a whole block waiting where there are few (narrow tiles: shards of the features).
    constexpr std::int64_t per_warp = 128;
    const std::int64_t vectors = divide_up(piece.columns, Vector<T>::kSize);
    if (vectors > 4 * per_warp)
      launch_filter<T, 8>(view, piece, stream);
    else if (vectors > 2 * per_warp)
      launch_filter<T, 4>(view, piece, stream);
    else if (vectors > per_warp)
      launch_filter<T, 2>(view, piece, stream);
    else
      launch_filter<T, 1>(view, piece, stream);
    if (!first) {
      const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(divide_up(piece.rows, kWarps), 1056));
      survey_tile<T><<<blocks, kThreads, 0, stream>>>(view, piece);
    }
  }

  /// All tiles once.
  void pass(const Execution& execution, const View& view, const LayerBias& bias, std::int64_t budget,
            const Producer& producer, bool first) const {
    const Sizes sizes(request);
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    const Count wanted = relu() ? kNoBudget : static_cast<Count>(budget);
    with_type([&](auto type) {
      begin_pass<decltype(type)><<<264, kThreads, 0, stream>>>(view, bias, first, wanted, relu());
    });
    for (std::int64_t layer = 0; layer < request.n_layers; ++layer)
      for (std::int64_t block = 0; block < sizes.blocks; ++block)
        for (std::int64_t token = 0; token < view.n_tokens; token += sizes.tile_tokens) {
          TileRange range{layer, token, std::min(sizes.tile_tokens, view.n_tokens - token), block * sizes.tile_features,
                          0};
          range.feature_count = std::min(sizes.tile_features, request.n_features - range.feature_begin);
          const std::int64_t stride = round_up(range.feature_count, 8);
          producer(execution, range, {layout.tile, request.product, range.token_count, range.feature_count, stride});
          const Piece piece{layout.tile,
                            stride,
                            range.token_count,
                            range.token_begin,
                            range.feature_begin,
                            static_cast<int>(range.feature_count),
                            static_cast<int>(layer),
                            static_cast<int>(block),
                            bias.layer[layer] + range.feature_begin};
          with_type([&](auto type) { consume<decltype(type)>(view, piece, first, budget, stream); });
        }
    check(cudaGetLastError(), "a pass over the tiles");
  }

  /// `values` become their sums over all ranks.
  void sum(const Execution& execution, Count* values, std::int64_t n) const {
    exchange.sum(execution, {reinterpret_cast<std::int64_t*>(values), n});
  }

  /// Tokens of a feature shard's slice: [begin, end) of n.
  std::int64_t slice_begin(std::int64_t n, std::int64_t shard) const { return shard * n / request.place.feature_ranks; }

  /// Each shard judges a slice of the tokens: it has the lists of all shards for them, and tells all from where on an
  /// entry stays.
  void cut_to_the_best_of_all(const Execution& execution, const View& view, std::int64_t budget) const {
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    const std::int64_t n_shards = request.place.feature_ranks, shard = request.place.feature_index;
    const std::int64_t first = slice_begin(view.n_tokens, shard) * view.n_groups;
    const std::int64_t rows = slice_begin(view.n_tokens, shard + 1) * view.n_groups - first;
    const std::int64_t row_bytes = view.most * static_cast<std::int64_t>(sizeof(Count));
    std::vector<std::int64_t> sent, cut_offs;
    for (std::int64_t i = 0; i < n_shards; ++i) {
      const std::int64_t of_slice = (slice_begin(view.n_tokens, i + 1) - slice_begin(view.n_tokens, i)) * view.n_groups;
      sent.push_back(of_slice * row_bytes);
      cut_offs.push_back(of_slice * static_cast<std::int64_t>(sizeof(Count)));
    }
    const std::vector<std::int64_t> received(static_cast<std::size_t>(n_shards), rows * row_bytes);
    exchange.all_to_all(execution, view.word, sent, layout.received, received);
    if (rows > 0)
      find_cut_offs<<<static_cast<unsigned>(divide_up(rows, kWarps)), kThreads, 0, stream>>>(
          layout.received, view.n_shards, rows, view.most, static_cast<int>(budget), layout.cut_off + first);
    exchange.all_gather(execution, layout.cut_off, cut_offs);
    const std::int64_t lists = view.n_tokens * view.n_groups;
    if (lists > 0)
      cut_lists<<<static_cast<unsigned>(divide_up(lists, kThreads)), kThreads, 0, stream>>>(view, layout.cut_off);
  }

  void finish(const Execution& execution, const View& view, std::int64_t budget, const SparseActivations& out) const {
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    const auto groups = static_cast<unsigned>(view.n_groups);
    if (topk()) {
      if (request.place.feature_ranks > 1) cut_to_the_best_of_all(execution, view, budget);
      make_offsets<<<1, 1024, 0, stream>>>(view, out.row_offsets.data);
      if (view.n_tokens > 0)
        take_best<<<static_cast<unsigned>(view.n_tokens), 128,
                    static_cast<std::size_t>(round_up(budget, 4)) * sizeof(std::uint32_t), stream>>>(
            view, static_cast<int>(budget), out);
      set_hints<<<groups, 1024, 0, stream>>>(view);
    } else {
      const unsigned per_group = std::max(1u, 132u / groups);
      const auto token_blocks = static_cast<unsigned>(std::max<std::int64_t>(1, divide_up(view.n_tokens, kWarps)));
      if (!relu())
        for (int round = 0; round < kRounds; ++round) {
          search<<<dim3(per_group, groups), 512, 0, stream>>>(view, round);
          if (!view.several) continue;
          sum(execution, view.histogram + static_cast<std::int64_t>(round) * view.n_groups * kBins,
              view.n_groups * static_cast<std::int64_t>(kBins));
          choose_bin<<<groups, 512, 0, stream>>>(view, round);
        }
      const unsigned counters = groups * 2 + (view.several ? static_cast<unsigned>(view.n_layers) : 0u);
      count_entries<<<token_blocks, kThreads, kWarps * counters * sizeof(std::uint32_t), stream>>>(view);
      if (view.several) {
        if (view.n_shards > 1) {
          const std::vector<std::int64_t> bytes(static_cast<std::size_t>(view.n_shards),
                                                view.n_tokens * view.n_layers * 4);
          exchange.all_gather(execution, view.tie, bytes);
        }
        const auto blocks = static_cast<unsigned>(std::max<std::int64_t>(1, divide_up(view.n_tokens, kThreads)));
        total_ties<<<dim3(blocks, groups), kThreads, 0, stream>>>(view);
        sum(execution, view.of_slice, (view.n_slices + 1) * static_cast<std::int64_t>(view.n_groups));
      }
      admit_ties<<<groups, 1024, 0, stream>>>(view);
      make_offsets<<<1, 1024, 0, stream>>>(view, out.row_offsets.data);
      write_rows<<<token_blocks, kThreads, 0, stream>>>(view, out);
    }
    check(cudaGetLastError(), "taking what stays");
  }

  /// Captures the loop behind what `stream` has captured so far: while `loop` is set, another pass and its decision.
  template <class Body>
  void capture_loop(cudaStream_t stream, cudaGraphConditionalHandle loop, Body&& body) const {
    cudaStreamCaptureStatus status;
    cudaGraph_t graph = nullptr;
    const cudaGraphNode_t* before = nullptr;
    std::size_t n_before = 0;
    cudaGraphNode_t node = nullptr;
    cudaGraphNodeParams parameters = {};
    parameters.type = cudaGraphNodeTypeConditional;
    parameters.conditional.handle = loop;
    parameters.conditional.type = cudaGraphCondTypeWhile;
    parameters.conditional.size = 1;
#if CUDART_VERSION >= 13000
    const cudaGraphEdgeData* edges = nullptr;
    check(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, &before, &edges, &n_before), "capturing a loop");
    check(cudaGraphAddNode(&node, graph, before, edges, n_before, &parameters), "capturing a loop");
#else
    check(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, &before, &n_before), "capturing a loop");
    check(cudaGraphAddNode(&node, graph, before, n_before, &parameters), "capturing a loop");
#endif
    cudaGraph_t inside = parameters.conditional.phGraph_out[0];
    check(cudaStreamBeginCaptureToGraph(looper, inside, nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed),
          "capturing a loop");
    body(looper);
    check(cudaStreamEndCapture(looper, &inside), "capturing a loop");
#if CUDART_VERSION >= 13000
    check(cudaStreamUpdateCaptureDependencies(stream, &node, nullptr, 1, cudaStreamSetCaptureDependencies),
          "capturing a loop");
#else
    check(cudaStreamUpdateCaptureDependencies(stream, &node, 1, cudaStreamSetCaptureDependencies), "capturing a loop");
#endif
  }
};

std::int64_t DeviceSelection::workspace_bytes(const SelectionRequest& request) {
  check_request(request);
  Cutter cutter(nullptr);
  lay_out(request, cutter);
  return cutter.bytes();
}

DeviceSelection::DeviceSelection(const SelectionRequest& request, Array<std::byte> workspace,
                                 const Execution& execution, SelectionExchange exchange)
    : parts_(nullptr) {
  if (workspace.size < workspace_bytes(request))
    throw Error(ExitCode::internal, "selection on the GPU: the workspace is too small");
  auto parts = std::make_unique<Parts>();
  parts->request = request;
  parts->exchange = std::move(exchange);
  Cutter cutter(workspace.data);
  parts->layout = lay_out(request, cutter);
  check(cudaStreamCreateWithFlags(&parts->looper, cudaStreamNonBlocking), "making a stream");
  check(cudaMallocHost(&parts->seen, sizeof(Control)), "taking pinned memory");
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  set_thresholds<<<1, 128, 0, stream>>>(parts->layout.view.threshold, parts->layout.view.n_groups, kUnknown);
  const int bytes = room_of(request.rule == SelectionRule::topk ? request.budget : 1) * static_cast<int>(sizeof(Count));
  check(cudaFuncSetAttribute(keep_best<bf16>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "asking for memory");
  check(cudaFuncSetAttribute(keep_best<float>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "asking for memory");
  check(cudaGetLastError(), "the initial state");
  parts_ = parts.release();
}

DeviceSelection::~DeviceSelection() {
  cudaStreamDestroy(parts_->looper);
  cudaFreeHost(parts_->seen);
  delete parts_;
}

void DeviceSelection::select(const Execution& execution, std::int64_t n_tokens, std::int64_t budget,
                             std::span<const Array<const float>> bias_of_layer, const Producer& producer,
                             const SparseActivations& activations) {
  const SelectionRequest& request = parts_->request;
  const std::int64_t fewest = request.place.data_ranks > 1 ? 0 : 1;
  if (n_tokens < fewest || n_tokens > request.n_tokens || budget < 1 ||
      (request.rule != SelectionRule::relu && budget > request.budget) ||
      static_cast<std::int64_t>(bias_of_layer.size()) != request.n_layers)
    throw Error(ExitCode::internal, "selection on the GPU: the batch is not what was asked for");
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  View view = parts_->layout.view;
  view.n_tokens = n_tokens;
  LayerBias bias{};
  for (std::size_t layer = 0; layer < bias_of_layer.size(); ++layer) bias.layer[layer] = bias_of_layer[layer].data;

  parts_->pass(execution, view, bias, budget, producer, true);
  if (!parts_->topk()) {
    if (view.several) {
      tell_pass<<<1, kMostLayers, 0, stream>>>(view);
      parts_->sum(execution, &view.agreement->passed, view.n_groups * kAgreementCounts);
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "asking for the capture");
    const bool relu = parts_->relu();
    if (status == cudaStreamCaptureStatusActive) {
      cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
      check(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr), "capturing a loop");
#else
      check(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, nullptr, nullptr), "capturing a loop");
#endif
      cudaGraphConditionalHandle loop;
      check(cudaGraphConditionalHandleCreate(&loop, graph, 0, cudaGraphCondAssignDefault), "making a loop");
      decide<<<1, 1024, 0, stream>>>(view, relu, true, loop);
      parts_->capture_loop(stream, loop, [&](cudaStream_t inside) {
        const Execution body{execution.backend, inside};
        parts_->pass(body, view, bias, budget, producer, false);
        decide<<<1, 1024, 0, inside>>>(view, relu, true, loop);
      });
    } else {
      for (;;) {
        decide<<<1, 1024, 0, stream>>>(view, relu, false, cudaGraphConditionalHandle{});
        check(cudaMemcpyAsync(parts_->seen, view.control, sizeof(Control), cudaMemcpyDeviceToHost, stream),
              "reading the decision");
        check(cudaStreamSynchronize(stream), "a pass over the tiles");
        if (parts_->seen->again == 0) break;
        parts_->pass(execution, view, bias, budget, producer, false);
      }
    }
  }
  parts_->finish(execution, view, budget, activations);
}

Array<std::uint32_t> DeviceSelection::thresholds() const {
  return {parts_->layout.view.threshold, parts_->layout.view.n_groups};
}

SelectionReport DeviceSelection::report(const Execution& execution) const {
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const View& view = parts_->layout.view;
  std::vector<Group> groups(static_cast<std::size_t>(view.n_groups));
  Control control{};
  check(cudaMemcpyAsync(groups.data(), view.group, groups.size() * sizeof(Group), cudaMemcpyDeviceToHost, stream),
        "reading the report");
  check(cudaMemcpyAsync(&control, view.control, sizeof control, cudaMemcpyDeviceToHost, stream), "reading the report");
  check(cudaStreamSynchronize(stream), "reading the report");
  SelectionReport report;
  report.passes = control.passes;
  report.overflow = control.overflow != 0;
  if (control.failed != 0)
    throw Error(ExitCode::internal, "selection on the GPU: a tile was not the same when it was made again");
  for (const Group& group : groups) {
    report.threshold.push_back(bits_float(group.kth));
    report.candidates.push_back(static_cast<std::int64_t>(group.cursor));
    report.ties_cut += static_cast<std::int64_t>(group.ties_cut);
  }
  return report;
}

}  // namespace weft::kernels::cuda
