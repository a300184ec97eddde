// SPDX-License-Identifier: Apache-2.0
//
// topk: the best of each token, and what shards of the features tell each other about them.
// Part of select_cuda.cu, which alone includes it.
#pragma once

#include "kernels/transcoder/select/select_view_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

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

}  // namespace
}  // namespace weft::kernels::cuda
