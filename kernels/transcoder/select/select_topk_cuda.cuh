// SPDX-License-Identifier: Apache-2.0
//
// topk: the best entries of each token, and their exchange between shards of the features.
// Included by select_cuda.cu only.
#pragma once

#include "kernels/transcoder/select/select_view_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

/// Sorts the first n words of `words` descending; returns how many of them count, at most `budget`. All threads of the
/// block call it. `words` has space for the next power of two.
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

/// A layer without an entry in any row: `open` = 0. The host passes it where that is common. One block per layer.
__global__ void __launch_bounds__(1024) find_open(View view, LayerBias bias) {
  const float* of_layer = bias.layer[blockIdx.x];
  bool any = false;
  for (std::int64_t i = threadIdx.x; i < view.n_features; i += blockDim.x) any |= of_layer[i] > -INFINITY;
  const int open = __syncthreads_or(any);
  if (threadIdx.x == 0) view.open[blockIdx.x] = open != 0;
}

/// A key that at least `budget` of the counted keys exceed, and how many do: the lower end of the histogram's bin with
/// the budget-th key. 0 and all if there are fewer. bins [kHistogramBins] of the upper bits. All threads of a block of
/// kThreads call it and get the same.
struct Bar {
  std::uint32_t key, above;
};
__device__ Bar bar_of(const std::uint32_t* bins, int budget) {
  __shared__ Bar result;
  constexpr int kEach = kHistogramBins / kThreads;
  const int highest = kHistogramBins - 1 - static_cast<int>(threadIdx.x) * kEach;
  Count own = 0, total;
  for (int i = 0; i < kEach; ++i) own += bins[highest - i];
  Count before = block_exclusive(own, total);
  const Count wanted = static_cast<Count>(budget);
  if (threadIdx.x == 0 && total < wanted) result = {0, static_cast<std::uint32_t>(total)};
  if (before < wanted && before + own >= wanted) {
    int bin = highest;
    for (before += bins[bin]; before < wanted; before += bins[bin]) --bin;
    const std::uint32_t lowest = static_cast<std::uint32_t>(bin) << histogram_shift(0);
    result = {lowest > 0 ? lowest - 1 : 0, static_cast<std::uint32_t>(before)};
  }
  __syncthreads();
  const Bar copy = result;
  __syncthreads();
  return copy;
}

/// Merges a tile's rows into the tokens' lists. One block per row; dynamic shared memory: `room` words, a power of two
/// of at least budget + 1024 and half the histogram's bins. It is kept small, so that the limits, which all rows read,
/// stay in the L1 cache.
///
/// Normally one look at the row suffices: the entries above the hint, which follow from the products here, or, where
/// filter_tile has `listed` them and its list held all, from there. If they are too few for the budget or too many for
/// the memory, a histogram of the row gives a bar, and the entries above it are collected.
template <class T>
__global__ void __launch_bounds__(kThreads)
    keep_best(View view, Piece piece, bool first_of_group, bool listed, int budget, int room) {
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
  if (view.open != nullptr && view.open[piece.layer] == 0) {  // the same for the whole grid
    if (!first_of_group) return;
    for (int i = threadIdx.x; i < budget; i += kThreads) list[i] = 0;
    if (threadIdx.x == 0) view.above[place] = view.admit[place] = 0;
    return;
  }
  const int old = first_of_group ? 0 : static_cast<int>(view.above[place]);
  for (int i = threadIdx.x; i < old; i += kThreads) words[i] = list[i];
  if (threadIdx.x == 0) n_words = old;
  __syncthreads();
  const std::uint32_t hint = view.threshold[g] >= kLargestKey ? 0 : view.threshold[g];
  // A full list raises the bar to its least word: later entries of equal key lose to it.
  std::uint32_t bar = old == budget ? key_of_word(words[budget - 1]) : hint;
  __syncthreads();

  // Entries of a vector that exceed the bar; `columns`: a bit for each that may.
  const auto look = [&](const uint4& x, int at, std::uint32_t columns) {
    for (; columns != 0; columns &= columns - 1) {
      const int j = __ffs(static_cast<int>(columns)) - 1, column = at * V::kSize + j;
      if (column >= piece.columns) break;
      const float r = V::get(x, j) + __ldg(piece.bias + column);
      if (r > __uint_as_float(bar)) {
        const int to = atomicAdd(&n_words, 1);
        if (to < room) words[to] = selection_word(__float_as_uint(r), index_base + column);
      }
    }
  };
  constexpr std::uint32_t kEach = (1u << V::kSize) - 1;
  // Visits all vectors of the row, with several loads in flight: visit(vector, its number).
  const auto for_each_vector = [&](auto&& visit) {
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
        if (at < vectors) visit(x[i], at);
      }
    }
  };
  int n = 0;
  bool too_many = false, too_few = false;
  if (listed && view.group[g].cursor <= static_cast<Count>(view.capacity)) {
    // The only tile of this row and group: there is no older list.
    const uint2 segment = view.segment[token * view.n_layers + piece.layer];
    const std::uint32_t key_base = static_cast<std::uint32_t>(piece.layer * view.n_features + piece.feature_begin);
    n = static_cast<int>(segment.y);
    too_many = n > room;
    too_few = n < budget && view.threshold[g] > 0;
    if (!too_many && !too_few)
      for (int i = threadIdx.x; i < n; i += kThreads)
        words[i] = selection_word(__float_as_uint(view.value[segment.x + i]),
                                  index_base + (view.key[segment.x + i] - key_base));
  } else {
    // The limits follow from the hint: they exclude nothing that exceeds a bar at or above it.
    const bool limited = bar >= hint && view.threshold[g] < kLargestKey;
    for_each_vector([&](const uint4& x, int at) {
      if (!limited) {
        look(x, at, kEach);
        return;
      }
      const uint4 limit = __ldg(limits + at);
      if (!V::any(x, limit)) return;
      std::uint32_t above = 0;
#pragma unroll
      for (int j = 0; j < V::kSize; ++j) above |= V::get(x, j) > V::get(limit, j) ? 1u << j : 0u;
      look(x, at, above);
    });
    __syncthreads();
    n = n_words;
    // Is the hint below the budget-th entry? Only entries above it count: some of the old list may not be.
    int counted = n;
    if (old < budget)
      for (int i = old - 1; i >= 0 && key_of_word(words[i]) <= bar; --i) --counted;
    too_many = n > room;
    too_few = old < budget && counted < budget && bar > 0;
  }
  if (too_many || too_few) {
    __syncthreads();
    if (too_few) bar = 0;  // the hint was too high for this token, or is not known
    auto* bins = reinterpret_cast<std::uint32_t*>(words);
    for (int i = threadIdx.x; i < kHistogramBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    for_each_vector([&](const uint4& x, int at) {
#pragma unroll
      for (int j = 0; j < V::kSize; ++j) {
        const int column = at * V::kSize + j;
        const std::uint32_t key = column < piece.columns ? selection_key(V::get(x, j) + __ldg(piece.bias + column)) : 0;
        if (key > bar) atomicAdd(bins + (key >> histogram_shift(0)), 1u);
      }
    });
    __syncthreads();
    const Bar found = bar_of(bins, budget);
    bar = max(bar, found.key);
    if (threadIdx.x == 0) n_words = old;
    for (int i = threadIdx.x; i < old; i += kThreads) words[i] = list[i];
    __syncthreads();
    if (old + found.above <= static_cast<std::uint32_t>(room)) {
      for_each_vector([&](const uint4& x, int at) { look(x, at, kEach); });
      __syncthreads();
    } else {  // many keys in one bin: check the list's length after every chunk
      const int chunk = min(kThreads, (room - budget) / V::kSize);
      for (int first = 0; first < vectors; first += chunk) {
        const bool full = n_words + chunk * V::kSize > room;  // the same for the whole block
        __syncthreads();
        if (full) {
          const int kept = keep_largest(words, n_words, budget);
          if (threadIdx.x == 0) n_words = kept;
          if (kept == budget) bar = max(bar, key_of_word(words[budget - 1]));
          __syncthreads();
        }
        const int at = first + static_cast<int>(threadIdx.x);
        if (static_cast<int>(threadIdx.x) < chunk && at < vectors) look(products[at], at, kEach);
        __syncthreads();
      }
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

/// Several shards: for each row of a slice of the tokens the budget-th word among the lists of all shards; 0 if there
/// are fewer. `lists` [n_lists, rows, most], descending, then 0. A word's rank is its position in its own list plus the
/// number of greater words in the others: no two are equal. One warp per row.
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

/// Several shards: shortens each list to the words that reach its cut-off [tokens, groups]. One thread per list.
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

/// Writes the lists as rows, and a histogram of the budget-th keys. One block of 128 threads per token; dynamic shared
/// memory: `budget` indices.
__global__ void __launch_bounds__(128) take_best(View view, int budget, SparseActivations out) {
  extern __shared__ std::uint32_t index[];
  const std::int64_t token = blockIdx.x;
  std::int64_t to = out.row_offsets[token];
  for (int g = 0; g < view.n_groups; ++g) {
    const std::int64_t place = g * view.n_tokens + token;
    const Count* list = view.word + (token * view.n_groups + g) * view.most;
    const int n = static_cast<int>(view.above[place]);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) index[i] = index_of_word(list[i]);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      const std::uint32_t own = index[i];
      int rank = 0;
      for (int j = 0; j < n; ++j) rank += index[j] < own;
      if (to + rank < out.key.size) {
        const std::uint32_t layer = own / view.n_features_total;
        const std::uint32_t feature = own - layer * view.n_features_total - view.feature_begin;
        out.key.data[to + rank] = layer * static_cast<std::uint32_t>(view.n_features) + feature;
        out.value.data[to + rank] = __uint_as_float(key_of_word(list[i]));
      }
    }
    if (threadIdx.x == 0) {
      const std::uint32_t least = key_of_word(list[budget - 1]);
      atomicAdd(&view.histogram[g * kHistogramBins + (least >> histogram_shift(0))], Count{1});
    }
    to += n;
  }
}

/// The hint for the next batch: 63 of 64 tokens had their budget-th key above it, to 11 bits below the first
/// histogram's bins, so that few entries more than needed exceed it. One block per group.
__global__ void __launch_bounds__(1024) set_hints(View view, int budget) {
  const int g = blockIdx.x;
  const Count n = static_cast<Count>(view.n_tokens);
  const auto histogram = [&](int round) {
    return view.histogram + (static_cast<std::int64_t>(round) * view.n_groups + g) * kHistogramBins;
  };
  KeySearch<Count> search{.wanted = n - n / 64};
  search.advance(pick_bin_by_block(histogram(0), search.rank()));
  const bool known = !search.exhausted && search.prefix > 0;
  if (known) {  // the same for the whole block
    const HistogramRound round = search.round();
    for (std::int64_t token = threadIdx.x; token < view.n_tokens; token += blockDim.x) {
      const int bin = round.bin(key_of_word(view.word[(token * view.n_groups + g) * view.most + budget - 1]));
      if (bin >= 0) atomicAdd(histogram(1) + bin, Count{1});
    }
    __syncthreads();
    search.advance(pick_bin_by_block(histogram(1), search.rank()));
  }
  if (threadIdx.x == 0) view.threshold[g] = known ? search.threshold() : 0;
}

__global__ void set_thresholds(std::uint32_t* threshold, int n, std::uint32_t value) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) threshold[i] = value;
}

}  // namespace
}  // namespace weft::kernels::cuda
