// SPDX-License-Identifier: Apache-2.0
//
// Types and helpers that the kernels of the selection share: the lists, histograms and counters of a batch in memory
// (View), one tile of products (Piece), prefix sums and packed comparisons. Included by select_cuda.cu only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/bf16.hpp"
#include "kernels/constants.hpp"
#include "kernels/transcoder/select/select_request.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

using Count = unsigned long long;  // type of integer atomics

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// The filter keeps 4 loads of 16 bytes in flight for each of 1280 threads per multiprocessor, enough for the bandwidth
// of an H200. Other values: docs/experiments_log.md.
constexpr int kInFlight = 2;  // vectors of 16 bytes of each row that a lane loads before it compares them
constexpr int kShared = 2;    // rows that a warp compares with the same limits
#ifdef WEFT_BEFORE_AMPERE
constexpr int kBlocksPerProcessor = 4;  // 1024 threads
#else
constexpr int kBlocksPerProcessor = 5;  // resident; bounds the registers
#endif
constexpr int kBuffer = 64;  // entries of a row that a warp collects in shared memory; if more, it reads its span again
constexpr int kReplicas = 4;                     // histograms per block: neighbouring lanes often hit the same bin
constexpr unsigned kAll = 0xffffffffu;           // lanes of a warp
constexpr std::uint32_t kUnknown = 0xffffffffu;  // a threshold
/// Six passes suffice if a tile has the same bits each time it is computed; a graph must not loop forever if not.
constexpr std::uint32_t kMostPasses = 12;
constexpr Count kNoBudget = ~Count{0};
constexpr int kLastBins = 1 << histogram_width(kHistogramRounds - 1);  // bins of the last round of the search

/// Task of a pass over the tiles for a group.
enum Mode : std::uint32_t {
  kFilter,     // append keys above the threshold to the list
  kHistogram,  // count keys of a round by bin
  kCountTies,  // count keys equal to the threshold for each token
  kAdmit,      // as kFilter; also appends the first `admit` keys of each token that are equal to the threshold
  kSettled     // none: the list is complete
};

struct Group {
  KeySearch<Count>
      search;  // search for the K-th key; in repeated passes among all keys of this rank, then in the lists
  std::uint32_t mode;
  std::uint32_t kth;  // the K-th key; 0: every entry of the list is selected
  Count cursor;       // entries that passed the filter, stored or not
  Count room;         // entries equal to the K-th key that are selected
  Count ties_cut;     // entries equal to the K-th key that are not selected
  std::uint32_t ticket;
  // Several ranks.
  std::uint32_t guess;      // the threshold of the first pass
  Count earlier_ties;       // entries equal to the K-th key in earlier slices of the batch
  std::uint32_t cuts_here;  // not 0: some of this slice's entries at the K-th key are selected and some are not
  std::int64_t cut_token;   // token of which some entries at the K-th key are selected and some are not
  Count cut_kept;  // number of cut_token's entries at the K-th key that are selected; 0: there is no such token
};

/// Values that are summed over ranks for each group after the first pass. The sums of halves and of their squares show
/// if all ranks had the same threshold: n values are equal if and only if n times the sum of squares is the square of
/// the sum.
struct Agreement {
  Count passed;  // entries above the threshold
  Count upper, upper_squared;
  Count lower, lower_squared;
};
constexpr std::int64_t kAgreementCounts = sizeof(Agreement) / sizeof(Count);
/// Largest number of ranks: with more, the sums of squares would overflow.
constexpr std::int64_t kMostRanks = 65536;

struct Control {
  std::uint32_t again;  // another pass is needed
  std::uint32_t passes;
  std::uint32_t failed;     // SelectionFailure::Kind of the last selection
  std::uint32_t cuts_here;  // several ranks: not 0 if it is in any group; equal on all shards of a slice
  SelectionFailure first;   // first failure since construction
};

/// Sizes and memory of a selection: the argument of every kernel.
struct View {
  int n_groups;
  int n_layers;
  int n_blocks;  // feature blocks of a layer: a token has a segment of the list for each
  std::int64_t block_features;
  bool all_layers;
  std::int64_t n_tokens;  // tokens of this batch
  std::int64_t n_features;
  std::int64_t padded_features;  // a multiple of 8, or of kHopperFeatures
  std::int64_t capacity;         // entries of a group's list
  std::int64_t most;             // entries of a token's list (topk)
  Control* control;
  std::int32_t* fault;  // set when a selection fails; null: not reported
  Group* group;
  std::uint32_t* threshold;  // [groups]; not for topk
  void* limit;  // [layers, padded features] of the product's type (hopper_filter.hpp: fp32): products up to it cannot
                // pass
  float* bias;  // [layers, padded features] the biases, -infinity in the padding (topk)
  float* largest;      // [rows of the tile, parts] from the kernel that formed the tile (PartsOfRows); null: not known
  Count* histogram;    // [rounds, groups, bins]
  Count* survey;       // [groups, bins] histograms of a repeated pass
  std::uint32_t* key;  // [groups, capacity]
  float* value;        // [groups, capacity]
  uint2* segment;      // [tokens, layers, blocks] first entry in the list, entries
  std::uint32_t* above;  // [groups, tokens] entries above the K-th key, all selected
  std::uint32_t* tied;   // [groups, tokens] entries equal to the K-th key
  std::uint32_t* admit;  // [groups, tokens] how many of `tied` are selected
  std::uint32_t* used;   // [groups, tokens] how many a pass over the tiles has admitted
  Count* word;           // [tokens, groups, most] best words of a token, descending, then 0 (topk)
  std::uint32_t* open;   // [layers] 0 if no feature of the layer can be selected; null: not known

  // Members for several ranks. `several` is for batch_topk only, the others also for topk.
  bool several;
  int n_ranks, n_shards, shard, n_slices, slice;  // all; of the feature axis; of the data axis
  std::uint32_t n_features_total;                 // per layer
  std::uint32_t feature_begin;
  Agreement* agreement;          // [groups]
  std::uint32_t* tied_of_shard;  // [shards, groups, tokens] `tied` of all shards; `tied` is a part of it
  std::uint32_t* tie;            // [tokens, layers] this rank's entries equal to the K-th key
  std::uint32_t* cut_tie;        // [shards, layers] `tie` of each group's cut_token
  Count* last_round;             // [slices, groups, kLastBins] the last histogram of each slice of the batch

  __device__ Count* last_round_of(int of_slice, int g) const {
    return last_round + (static_cast<std::int64_t>(of_slice) * n_groups + g) * kLastBins;
  }

  __device__ int group_of(int layer) const { return all_layers ? 0 : layer; }
};

/// One vector [n_features] for each layer: biases, or bounds (null: none).
struct LayerBias {
  const float* layer[kMostLayers];
};

/// A tile of products. Rows are padded to a multiple of 8 elements; the padding is arbitrary.
struct Piece {
  const void* data;
  std::int64_t stride;
  std::int64_t rows;
  std::int64_t token_begin;
  std::int64_t feature_begin;
  int columns;
  int layer;
  int block;
  const float* bias;    // bias of the first column
  const float* bounds;  // from the first column on; null: the threshold of the group
};

// ---- prefix sums ---------------------------------------------------------------------------------------------------

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

/// Returns the sum over the threads before this one, and the sum over all threads in `total`. Every thread of a block
/// of whole warps calls it.
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

/// pick_bin (selection_rule.hpp) by a block of threads: all of them call it and get the same result. Rank 0 gives
/// bin -1.
__device__ PickedBin<Count> pick_bin_by_block(const Count* histogram, Count rank) {
  __shared__ PickedBin<Count> result;
  const int per = kHistogramBins / blockDim.x;
  Count own = 0;
  for (int i = 0; i < per; ++i) own += __ldcg(histogram + kHistogramBins - 1 - (threadIdx.x * per + i));
  Count total;
  Count before = block_exclusive(own, total);
  if (threadIdx.x == 0 && (rank == 0 || total < rank)) result = {-1, total, 0};
  if (before < rank && before + own >= rank) {
    for (int i = 0; i < per; ++i) {
      const int bin = kHistogramBins - 1 - (static_cast<int>(threadIdx.x) * per + i);
      const Count in = __ldcg(histogram + bin);
      if (before + in >= rank) {
        result = {bin, before, in};
        break;
      }
      before += in;
    }
  }
  __syncthreads();
  const PickedBin<Count> copy = result;
  __syncthreads();
  return copy;
}

/// A vector of 16 bytes of products.
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
  /// True if any element is greater than its limit.
  static __device__ __forceinline__ bool any(const uint4& x, const uint4& limit) {
    return (greater(x.x, limit.x) | greater(x.y, limit.y) | greater(x.z, limit.z) | greater(x.w, limit.w)) != 0;
  }
  /// The largest value of the type that is not above c.
  static __device__ __forceinline__ bf16 below(float c) {
    const std::uint32_t bits = __float_as_uint(c);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7f80};  // NaN: no entry can pass
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
  static __device__ __forceinline__ float below(float c) { return c == c ? c : __uint_as_float(kLargestKey); }
  static __device__ __forceinline__ float nothing() { return __uint_as_float(kLargestKey); }
  static __device__ __forceinline__ std::uint32_t nothing_word() { return kLargestKey; }
};

/// True if all of several ranks filtered with the same threshold and at least K entries passed. Then no entry at or
/// below the threshold is selected, even if this rank has few entries. If not, every rank continues until its own list
/// reaches down to its own K-th key, which is never above the K-th key of all ranks; so the loop over tiles needs no
/// exchange.
__device__ bool reached(const View& view, int g) {
  if (!view.several) return false;
  const Agreement& all = view.agreement[g];
  const Count n = static_cast<Count>(view.n_ranks);
  return n * all.upper_squared == all.upper * all.upper && n * all.lower_squared == all.lower * all.lower &&
         all.passed >= view.group[g].search.wanted;
}

}  // namespace
}  // namespace weft::kernels::cuda
