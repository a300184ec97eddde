// SPDX-License-Identifier: Apache-2.0
//
// topk: the best entries of each token, and their exchange between shards of the features.
// Included by select_cuda.cu only.
#pragma once

#include "kernels/transcoder/select/hopper_filter.hpp"
#include "kernels/transcoder/select/select_view_cuda.cuh"
#include "kernels/transcoder/select/sort_network.hpp"

namespace weft::kernels::cuda {
namespace {

/// Returns how many of n descending words are greater than `word`.
__device__ int count_greater(const Count* words, int n, Count word) {
  int begin = 0, end = n;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (words[middle] > word)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

/// Sorts the first n words of `words` descending, of which the first `sorted` already are; returns how many of them
/// count, at most `budget`. All threads of the block call it.
__device__ int keep_largest(Count* words, int n, int sorted, int budget) {
  __syncthreads();
  // Each word finds its rank by comparison with those that are not sorted yet, if they are few.
  constexpr int kEach = 4, kRanked = 2 * kThreads;
  if (n <= kRanked || (n <= kEach * kThreads && n - sorted <= kThreads)) {
    Count own[kEach];
    int rank[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      if (at >= n) break;
      own[i] = words[at];
      rank[i] = at < sorted ? at : count_greater(words, sorted, own[i]);
      for (int j = sorted; j < n; ++j) rank[i] += words[j] > own[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (static_cast<int>(threadIdx.x) + i * kThreads < n) words[rank[i]] = own[i];
  } else {
    int size = kRanked;
    while (size < n) size *= 2;
    for (int run = 2; run <= size; run *= 2)
      for (int distance = run / 2; distance > 0; distance /= 2) {
        __syncthreads();
        for (int pair = threadIdx.x; pair < size / 2; pair += kThreads) {
          const auto [low, high] = comparator(pair, run, distance);
          if (high >= n) continue;
          const Count a = words[low], b = words[high];
          if (a < b) {
            words[low] = b;
            words[high] = a;
          }
        }
      }
  }
  __syncthreads();
  return min(n, budget);
}

/// Sets `open` = 0 for a layer without an entry in any row. The host passes `open` where that is common. One block per
/// layer.
__global__ void __launch_bounds__(1024) find_open(View view, LayerBias bias) {
  const float* of_layer = bias.layer[blockIdx.x];
  bool any = false;
  for (std::int64_t i = threadIdx.x; i < view.n_features; i += blockDim.x) any |= of_layer[i] > -INFINITY;
  const int open = __syncthreads_or(any);
  if (threadIdx.x == 0) view.open[blockIdx.x] = open != 0;
}

/// The bar: a key that at least `budget` of the counted keys exceed, and the number of keys that exceed it. It is the
/// lower end of the histogram's bin with the budget-th key; 0 and the number of all keys if there are fewer. bins
/// [kHistogramBins] of the upper bits. All threads of a block of kThreads call it and get the same.
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

/// Number of a thread's parts of a row whose largest keys bound the budget-th key.
constexpr int kPartsOfThread = 8;
constexpr int kMostParts = kPartsOfThread * kThreads;
constexpr int kKnownPart = static_cast<int>(kHopperPart);

/// Merges a tile's rows into the tokens' lists. One block per row; dynamic shared memory: `room` words, of at
/// least budget + 1024 and of both arrays below (topk_room). It is kept small, so that the biases, which all rows read,
/// stay in the L1 cache.
///
/// The bar is a key that at least `budget` keys exceed: the least of a full list, or a bound by the largest keys of
/// parts of the row, which are keys of as many entries. The parts whose largest key exceeds the bar are read again,
/// from the L2 cache, and the entries that exceed it are sorted into the list. Their number is usually little above
/// the budget. If it is more than the memory holds (ties, budgets of thousands), a histogram of the row raises the bar.
///
/// kKnown: the kernel that formed the tile found the largest keys, in view.largest; the row is not read as a whole.
template <class T, bool kKnown>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    keep_best(View view, Piece piece, bool first_of_group, int budget, int room) {
  using V = Vector<T>;
  constexpr int kAtOnce = 2;  // vectors that a thread loads before it uses the first
  constexpr int kChunk = kThreads * kAtOnce;
  constexpr int kParts = kPartsOfThread;  // parts of a thread's vectors: every eighth chunk
  extern __shared__ Count words[];
  __shared__ std::uint16_t read_again[kMostParts];
  __shared__ int n_again, n_words;
  const int g = view.group_of(piece.layer), thread = static_cast<int>(threadIdx.x);
  const std::int64_t row = blockIdx.x, token = piece.token_begin + row, place = g * view.n_tokens + token;
  const uint4* products = reinterpret_cast<const uint4*>(static_cast<const T*>(piece.data) + row * piece.stride);
  const float* biases = view.bias + piece.layer * view.padded_features + piece.feature_begin;
  const int vectors = (piece.columns + V::kSize - 1) / V::kSize, chunks = (vectors + kChunk - 1) / kChunk;
  const std::uint32_t index_base = static_cast<std::uint32_t>(
      piece.layer * static_cast<std::int64_t>(view.n_features_total) + view.feature_begin + piece.feature_begin);
  Count* list = view.word + (token * view.n_groups + g) * view.most;
  if (view.open != nullptr && view.open[piece.layer] == 0) {  // uniform over the grid
    if (!first_of_group) return;
    for (int i = thread; i < budget; i += kThreads) list[i] = 0;
    if (thread == 0) view.above[place] = view.admit[place] = 0;
    return;
  }
  const int old = first_of_group ? 0 : static_cast<int>(view.above[place]);
  const bool full = old == budget;  // then later entries of the least key lose to it
  auto* const bins = reinterpret_cast<std::uint32_t*>(words);
  std::uint32_t* const most = bins + kHistogramBins;  // [parts, threads], unless kKnown
  const int own_parts = min(chunks, kParts), known_parts = (piece.columns + kKnownPart - 1) / kKnownPart;
  const auto clear_bins = [&] {
    for (int i = thread; i < kHistogramBins; i += kThreads) bins[i] = 0;
  };
  const auto count = [&](std::uint32_t key) {
    if (key > 0) atomicAdd(bins + (key >> histogram_shift(0)), 1u);
  };
  // Visits the sums of a vector: visit(sum, place in the vector). Sums in the padding of a row are -infinity or NaN.
  const auto for_each_sum = [&](const uint4& x, int at, auto&& visit) {
#pragma unroll
    for (int j = 0; j < V::kSize; j += 4) {
      const float4 bias = __ldg(reinterpret_cast<const float4*>(biases + at * V::kSize + j));
      visit(V::get(x, j) + bias.x, j);
      visit(V::get(x, j + 1) + bias.y, j + 1);
      visit(V::get(x, j + 2) + bias.z, j + 2);
      visit(V::get(x, j + 3) + bias.w, j + 3);
    }
  };
  // Visits the thread's vectors of a chunk: visit(vector, its number).
  const auto for_each_vector = [&](int chunk, auto&& visit) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = chunk * kChunk + i * kThreads + thread;
      x[i] = at < vectors ? __ldcs(products + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = chunk * kChunk + i * kThreads + thread;
      if (at < vectors) visit(x[i], at);
    }
  };
  std::uint32_t bar = 0;
  const auto look = [&](const uint4& x, int at) {
    for_each_sum(x, at, [&](float sum, int j) {
      if (!(sum > __uint_as_float(bar))) return;
      const int to = atomicAdd(&n_words, 1);
      if (to < room) words[to] = selection_word(__float_as_uint(sum), index_base + at * V::kSize + j);
    });
  };

  if (thread == 0) {
    n_again = 0;
    n_words = old;
  }
  if (!full) clear_bins();
  // Visits the parts of this thread: visit(largest key, number).
  const auto for_each_part = [&](auto&& visit) {
    if constexpr (kKnown)
      for (int part = thread; part < known_parts; part += kThreads)
        visit(selection_key(__ldg(view.largest + row * known_parts + part)), part);
    else
      for (int part = 0; part < own_parts; ++part) visit(most[part * kThreads + thread], thread * kParts + part);
  };
  // Visits the vectors of a part that one of kEach threads reads again: visit(vector, its number).
  constexpr int kEach = kKnown ? kKnownPart / V::kSize : kAtOnce;
  const auto for_each_again = [&](int part, int i, auto&& visit) {
    if constexpr (kKnown) {
      const int at = part * kEach + i;
      if (at < vectors) visit(__ldcg(products + at), at);
    } else {
      for (int chunk = part % kParts; chunk < chunks; chunk += kParts) {
        const int at = chunk * kChunk + i * kThreads + part / kParts;
        if (at < vectors) visit(__ldcg(products + at), at);
      }
    }
  };
  if constexpr (!kKnown)
    for (int part = 0; part < own_parts; ++part) {
      float largest = 0.0f;
      for (int chunk = part; chunk < chunks; chunk += kParts)
        for_each_vector(chunk, [&](const uint4& x, int at) {
          for_each_sum(x, at, [&](float sum, int) { largest = fmaxf(largest, sum); });
        });
      most[part * kThreads + thread] = selection_key(largest);
    }
  std::uint32_t largest = 0;
  for_each_part([&](std::uint32_t key, int) { largest = max(largest, key); });
  __syncthreads();
  if (full) {
    bar = key_of_word(list[budget - 1]);
  } else {
    if (budget <= kThreads / 2)
      count(largest);
    else
      for_each_part([&](std::uint32_t key, int) { count(key); });
    __syncthreads();
    bar = bar_of(bins, budget).key;
  }
  if (largest > bar)
    for_each_part([&](std::uint32_t key, int part) {
      if (key > bar) read_again[atomicAdd(&n_again, 1)] = static_cast<std::uint16_t>(part);
    });
  __syncthreads();
  if (n_again == 0 && !first_of_group) return;
  for (int i = thread; i < old; i += kThreads) words[i] = list[i];
  for (int i = thread; i < n_again * kEach; i += kThreads) for_each_again(read_again[i / kEach], i % kEach, look);
  __syncthreads();
  int n = n_words;
  if (n > room) {
    __syncthreads();
    clear_bins();
    __syncthreads();
    for (int chunk = 0; chunk < chunks; ++chunk)
      for_each_vector(chunk, [&](const uint4& x, int at) {
        for_each_sum(x, at, [&](float sum, int) {
          const std::uint32_t key = selection_key(sum);
          if (key > bar) count(key);
        });
      });
    __syncthreads();
    const Bar found = bar_of(bins, budget);
    bar = max(bar, found.key);
    if (thread == 0) n_words = old;
    for (int i = thread; i < old; i += kThreads) words[i] = list[i];
    __syncthreads();
    if (old + found.above <= static_cast<std::uint32_t>(room)) {
      for (int chunk = 0; chunk < chunks; ++chunk) for_each_vector(chunk, look);
      __syncthreads();
    } else {  // many keys in one bin: check the list's length after every few vectors
      const int step = min(kThreads, (room - budget) / V::kSize);
      for (int first = 0; first < vectors; first += step) {
        const bool crowded = n_words + step * V::kSize > room;  // uniform over the block
        __syncthreads();
        if (crowded) {
          const int kept = keep_largest(words, n_words, 0, budget);
          if (thread == 0) n_words = kept;
          if (kept == budget) bar = max(bar, key_of_word(words[budget - 1]));
          __syncthreads();
        }
        const int at = first + thread;
        if (thread < step && at < vectors) look(products[at], at);
        __syncthreads();
      }
    }
    n = keep_largest(words, n_words, 0, budget);
  } else {
    n = keep_largest(words, n, old, budget);
  }
  for (int i = thread; i < budget; i += kThreads) list[i] = i < n ? words[i] : 0;
  if (thread == 0) {
    view.above[place] = n;
    view.admit[place] = 0;
  }
}

/// Finds, for each row of a slice of the tokens, the budget-th word among the lists of all shards; 0 if there are
/// fewer. Only with several shards. `lists` [n_lists, rows, most], descending, then 0. A word's rank is its position in
/// its own list plus the number of greater words in the others: no two are equal. One warp per row.
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
        rank += count_greater(lists + (other * rows + row) * most, budget, list[i]);
      }
      if (rank == budget - 1) found = list[i];
    }
  }
  const unsigned holders = __ballot_sync(kAll, found != 0);
  if (holders != 0) found = __shfl_sync(kAll, found, __ffs(static_cast<int>(holders)) - 1);
  if (lane == 0) cut_off[row] = found;
}

/// Shortens each list to the words that reach its cut-off [tokens, groups]. Only with several shards. One thread per
/// list.
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

/// Writes the lists as rows. One block of 128 threads per token; dynamic shared memory: an index for each entry of the
/// longest list.
__global__ void __launch_bounds__(128) take_best(View view, SparseActivations out) {
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
    to += n;
  }
}

__global__ void set_thresholds(std::uint32_t* threshold, int n, std::uint32_t value) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) threshold[i] = value;
}

}  // namespace
}  // namespace weft::kernels::cuda
