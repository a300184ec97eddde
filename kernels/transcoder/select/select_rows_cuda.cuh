// SPDX-License-Identifier: Apache-2.0
//
// Builds rows from the list of entries that passed: the exact K-th key, ties in order, offsets, entries.
// Included by select_cuda.cu only.
#pragma once

#include "kernels/transcoder/select/select_view_cuda.cuh"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels::cuda {
namespace {

/// Finishes a round of the search for the K-th key. All threads of a block call it.
__device__ void take_bin(Group& group, const Count* histogram, int round) {
  KeySearch<Count> search = group.search;
  if (round == 0) search = {search.wanted};
  search.advance(pick_bin_by_block(histogram, search.rank()));
  if (threadIdx.x != 0) return;
  group.search = search;
  group.ticket = 0;
  if (search.exhausted || search.rounds < kHistogramRounds) return;  // kth = 0: all entries are selected
  group.kth = search.key();
  group.room = search.ties_kept();
}

/// One round of the search among a group's candidates. The last block of a group picks the bin; with several ranks
/// `choose_bin` does, from the sum over all ranks. Grid (blocks, groups).
__global__ void __launch_bounds__(512) search(View view, int round) {
  __shared__ std::uint32_t bins[kReplicas][kHistogramBins];
  __shared__ bool last;
  const int g = blockIdx.y;
  Group& group = view.group[g];
  const Count n = min(group.cursor, static_cast<Count>(view.capacity));
  const bool all_selected = view.several ? round > 0 && group.search.exhausted : n < group.search.wanted;
  if (all_selected) return;  // kth = 0
  for (int b = threadIdx.x; b < kReplicas * kHistogramBins; b += blockDim.x) (&bins[0][0])[b] = 0;
  __syncthreads();
  const HistogramRound keys{round, round == 0 ? 0 : group.search.prefix};
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
      const int bin = keys.bin(key[j]);
      if (bin >= 0) atomicAdd(own + bin, 1u);
    }
  }
  __syncthreads();
  const bool by_slice = view.several && round == kHistogramRounds - 1;
  Count* histogram = by_slice
                         ? view.last_round_of(view.slice, g)
                         : view.histogram + (static_cast<std::int64_t>(round) * view.n_groups + g) * kHistogramBins;
  // Ties that an overflowing list left out count as well: they follow the K-th entry, so they do not change its key.
  if (by_slice && blockIdx.x == 0 && threadIdx.x == 0 && group.ties_cut > 0)
    if (const int bin = keys.bin(view.threshold[g]); bin >= 0) atomicAdd(histogram + bin, group.ties_cut);
  for (int b = threadIdx.x; b < kHistogramBins; b += blockDim.x) {
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

/// Picks the bin of a round from the sum over all ranks. Only with several ranks. The last histograms are separate for
/// each slice of the batch, so they also show in which slice the selected ties end. One block per group.
__global__ void __launch_bounds__(512) choose_bin(View view, int round) {
  const int g = blockIdx.x;
  Group& group = view.group[g];
  if (round > 0 && group.search.exhausted) return;
  const bool last = round == kHistogramRounds - 1;
  Count* histogram = view.histogram + (static_cast<std::int64_t>(round) * view.n_groups + g) * kHistogramBins;
  if (last) {
    for (int b = threadIdx.x; b < kLastBins; b += blockDim.x) {
      Count sum = 0;
      for (int slice = 0; slice < view.n_slices; ++slice) sum += view.last_round_of(slice, g)[b];
      histogram[b] = sum;
    }
    __syncthreads();
  }
  take_bin(group, histogram, round);
  if (!last || threadIdx.x != 0) return;
  const std::uint32_t bin = group.kth % kLastBins;
  Count earlier = 0;
  for (int slice = 0; slice < view.slice; ++slice) earlier += view.last_round_of(slice, g)[bin];
  group.earlier_ties = earlier;
  group.ties_cut = group.search.ties_cut();
  group.cuts_here = earlier < group.room && group.room < earlier + view.last_round_of(view.slice, g)[bin];
  if (group.cuts_here != 0) atomicOr(&view.control->cuts_here, 1u);
}

/// Visits the entries of one token in key order, 32 at a time: visit(in use, segment, position in the list) is called
/// by the whole warp; `segment` counts the token's segments. A lane reads several of them at once: most are empty where
/// they have few features.
template <class Visit>
__device__ __forceinline__ void for_each_entry(const View& view, std::int64_t token, int lane, Visit&& visit) {
  constexpr int kEach = 4;
  const int n_segments = view.n_layers * view.n_blocks;
  const uint2* segments = view.segment + token * n_segments;
  for (int first = 0; first < n_segments; first += 32 * kEach) {
    const int from = first + lane * kEach;
    uint2 own[kEach];
    int count = 0, total;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      own[i] = from + i < n_segments ? segments[from + i] : make_uint2(0, 0);
      count += static_cast<int>(own[i].y);
    }
    const int start = warp_exclusive(count, lane, total);
    for (int entry = 0; entry < total; entry += 32) {
      const int wanted = entry + lane;
      int at = 0;  // the last lane whose segments start at or before `wanted`
#pragma unroll
      for (int step = 16; step > 0; step >>= 1) {
        const int other = __shfl_sync(kAll, start, at + step);
        if (other <= wanted) at += step;
      }
      int left = wanted - __shfl_sync(kAll, start, at), segment = 0;
      std::uint32_t place = 0;
      bool found = false;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const std::uint32_t list = __shfl_sync(kAll, own[i].x, at);
        const int entries = static_cast<int>(__shfl_sync(kAll, own[i].y, at));
        if (!found && left < entries) {
          found = true;
          segment = first + at * kEach + i;
          place = list + static_cast<std::uint32_t>(left);
        }
        left -= entries;
      }
      visit(wanted < total, segment, place);
    }
  }
}

/// Counts entries above and at the K-th key for each group and token; with several ranks also the entries at the K-th
/// key for each layer. One warp per token.
__global__ void __launch_bounds__(kThreads) count_entries(View view) {
  extern __shared__ std::uint32_t counters[];  // [warps, groups * 2 + layers if several ranks]
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
      view.tie[token * view.n_layers + layer] = of_layer[layer];
}

/// Returns the number of entries of one token, over all shards, that are equal to the K-th key.
__device__ Count ties_of_all(const View& view, int g, std::int64_t n) {
  Count all = 0;
  for (int shard = 0; shard < view.n_shards; ++shard)
    all += view.tied_of_shard[(static_cast<std::int64_t>(shard) * view.n_groups + g) * view.n_tokens + n];
  return all;
}

/// Admits this rank's share of the token that keeps only the first of its ties, in (layer, feature) order over all
/// shards. Only with several ranks. Called by one warp.
__device__ void admit_share(const View& view, int g, int lane) {
  const Group& group = view.group[g];
  if (group.cut_kept == 0) return;
  const int first = view.all_layers ? 0 : g, n = (view.all_layers ? view.n_layers : 1) * view.n_shards;
  Count own = 0, earlier = 0;
  for (int begin = 0; begin < n; begin += 32) {
    const int i = begin + lane, shard = i % view.n_shards, layer = first + i / view.n_shards;
    const int ties = i < n ? static_cast<int>(view.cut_tie[shard * view.n_layers + layer]) : 0;
    int total;
    const Count before = earlier + static_cast<Count>(warp_exclusive(ties, lane, total));
    if (shard == view.shard) own += ties_admitted(static_cast<Count>(ties), before, group.cut_kept);
    earlier += static_cast<Count>(total);
  }
  const std::uint32_t share = warp_total(static_cast<std::uint32_t>(own));
  if (lane == 0) view.admit[g * view.n_tokens + group.cut_token] = share;
}

/// Sets the threshold of the next batch. Several ranks use the sums of their first passes, so that their thresholds
/// stay the same; where those of this batch were not, the next ones follow from the K-th key alone. Called by one
/// thread.
__device__ void set_next_threshold(const View& view, int g) {
  const Group& group = view.group[g];
  const Count passed = view.several ? view.agreement[g].passed : min(group.cursor, static_cast<Count>(view.capacity));
  const bool known = !view.several || reached(view, g);
  const std::uint32_t threshold = !view.several ? view.threshold[g] : known ? group.guess : 0;
  view.threshold[g] = next_threshold(group.kth, threshold, known, passed, group.search.wanted);
}

/// Tokens of a thread of the two kernels that form prefix sums over all tokens by one block.
constexpr int kTokensAtOnce = 4;

/// Sets how many of its ties each token keeps: the first `room` in token order, over the slices of the batch and the
/// shards of the features. With several ranks, at most one token of a slice keeps only some of its ties; this rank's
/// share of them follows from the counts of its layers on all shards, to which this rank contributes its own
/// (admit_share). One block per group.
__global__ void __launch_bounds__(1024) admit_ties(View view) {
  const int g = blockIdx.x;
  Group& group = view.group[g];
  const std::int64_t tokens = g * view.n_tokens;
  const bool all_or_none = view.several && group.cuts_here == 0;
  if (all_or_none)
    for (std::int64_t n = threadIdx.x; n < view.n_tokens; n += blockDim.x)
      view.admit[tokens + n] = group.earlier_ties < group.room ? view.tied[tokens + n] : 0;
  Count total_before = view.several ? group.earlier_ties : 0;
  for (std::int64_t first = 0; first < view.n_tokens && !all_or_none; first += kTokensAtOnce * blockDim.x) {
    const std::int64_t from = first + kTokensAtOnce * threadIdx.x;
    Count tied[kTokensAtOnce], sum = 0, total;
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      const std::int64_t n = from + i;
      tied[i] = n >= view.n_tokens ? 0 : view.several ? ties_of_all(view, g, n) : view.tied[tokens + n];
      sum += tied[i];
    }
    Count before = total_before + block_exclusive(sum, total);
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      const std::int64_t n = from + i;
      if (n >= view.n_tokens) break;
      const Count kept = ties_admitted(tied[i], before, group.room);
      before += tied[i];
      if (view.several && kept > 0 && kept < tied[i]) {
        group.cut_token = n;
        group.cut_kept = kept;
        const int layer = view.all_layers ? 0 : g, last = view.all_layers ? view.n_layers : g + 1;
        for (int of = layer; of < last; ++of)
          view.cut_tie[static_cast<std::int64_t>(view.shard) * view.n_layers + of] = view.tie[n * view.n_layers + of];
      } else {
        view.admit[tokens + n] = kept == tied[i] ? view.tied[tokens + n] : static_cast<std::uint32_t>(kept);
      }
    }
    total_before += total;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (!view.several && total_before > group.room) group.ties_cut = total_before - group.room;
    if (group.search.wanted != kNoBudget) set_next_threshold(view, g);
  }
}

/// Forms row_offsets, the prefix sums of above + admit over all groups. One block.
__global__ void __launch_bounds__(1024) make_offsets(View view, std::int64_t* row_offsets) {
  if (view.several) {
    for (int g = threadIdx.x / 32; g < view.n_groups; g += blockDim.x / 32) admit_share(view, g, threadIdx.x % 32);
    __syncthreads();
  }
  Count sum = 0;
  for (std::int64_t first = 0; first < view.n_tokens; first += kTokensAtOnce * blockDim.x) {
    const std::int64_t from = first + kTokensAtOnce * threadIdx.x;
    Count count[kTokensAtOnce] = {}, own = 0, total;
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      const std::int64_t n = from + i;
      if (n < view.n_tokens)
#pragma unroll 4
        for (int g = 0; g < view.n_groups; ++g)
          count[i] += view.above[g * view.n_tokens + n] + view.admit[g * view.n_tokens + n];
      own += count[i];
    }
    Count before = sum + block_exclusive(own, total);
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      if (from + i < view.n_tokens) row_offsets[from + i] = static_cast<std::int64_t>(before);
      before += count[i];
    }
    sum += total;
  }
  if (threadIdx.x == 0) row_offsets[view.n_tokens] = static_cast<std::int64_t>(sum);
}

/// Writes the rows of the CSR. One warp per token.
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
    if (ties != 0) {  // uniform over the warp
      const unsigned same = __match_any_sync(kAll, g);
      const std::uint32_t rank = __popc(ties & same & before) + (g == last_group ? met : 0);
      if (tied) stays = rank < view.admit[g * view.n_tokens + token];
      // Carry the count of the last tied lane's group: entries ascend by layer, so earlier groups do not recur.
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

}  // namespace
}  // namespace weft::kernels::cuda
