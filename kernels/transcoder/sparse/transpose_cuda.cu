// SPDX-License-Identifier: Apache-2.0
//
// CSR -> CSC by counting: hits per feature, their prefix sums, every entry to its feature in any order, then to its
// index by rank. The rank of an entry is the number of hits of its feature with a smaller CSR position (positions
// ascend with the token), so the result does not depend on the order of the threads. Ranks are counted directly in
// short lists; for a long one the tokens are marked and counted in a bitmap, one segment of the batch after another.
//
// Counts and the number of entries stay on the device. About eight passes over the entries, 4 to 12 bytes per entry
// each.
#include <algorithm>

#include "kernels/scan_cuda.cuh"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "kernels/warp_cuda.cuh"
#include "kernels/workspace.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kScanBlock = kScanThreads * 4;  // number of counts that one block scans
constexpr std::uint32_t kLongList = 256;
constexpr std::int64_t kWindow = 1 << 18;  // tokens of the bitmap: 32 KiB of shared memory, and as much for counts

struct Entry {
  std::uint32_t position, token;
};
struct Workspace {
  std::uint32_t* cursor;     // [n_keys] hits written so far
  std::int64_t* block_sum;   // [blocks of the scan]
  std::uint32_t* counters;   // [1] long lists
  std::uint32_t* long_list;  // [capacity / (kLongList + 1) + 1] their keys
  Entry* entry;              // [capacity]
};

std::int64_t place(std::byte* data, std::int64_t n_keys, std::int64_t capacity, Workspace* workspace) {
  kernels::Workspace layout(data);
  const auto take = [&](auto*& pointer, std::int64_t count) {
    pointer = layout.take<std::remove_reference_t<decltype(*pointer)>>(count).data;
  };
  Workspace w{};
  take(w.cursor, n_keys);
  take(w.counters, 1);
  take(w.block_sum, n_keys / kScanBlock + 1);
  take(w.long_list, capacity / (kLongList + 1) + 1);
  take(w.entry, capacity);
  if (workspace != nullptr) *workspace = w;
  return layout.bytes();
}

__global__ void count_hits(const std::int64_t* row_offsets, std::int64_t n_tokens, const std::uint32_t* key,
                           std::uint32_t* count) {
  const std::int64_t total = row_offsets[n_tokens];
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total; i += step)
    atomicAdd(count + key[i], 1u);
}

__global__ void __launch_bounds__(kScanThreads)
    sum_counts(const std::uint32_t* count, std::int64_t n_keys, std::int64_t* block_sum) {
  const std::int64_t first = blockIdx.x * static_cast<std::int64_t>(kScanBlock) + threadIdx.x * 4;
  std::int64_t value[4];
  for (int i = 0; i < 4; ++i) value[i] = first + i < n_keys ? count[first + i] : 0;
  const std::int64_t sum = block_scan(value);
  if (threadIdx.x == 0) block_sum[blockIdx.x] = sum;
}

/// Turns counts into offsets and cursors and collects the long lists.
__global__ void __launch_bounds__(kScanThreads)
    write_offsets(std::uint32_t* count, std::int64_t n_keys, const std::int64_t* block_sum, std::int64_t* offsets,
                  std::uint32_t* counters, std::uint32_t* long_list) {
  const std::int64_t first = blockIdx.x * static_cast<std::int64_t>(kScanBlock) + threadIdx.x * 4;
  std::uint32_t mine[4] = {};
  std::int64_t before[4];
  for (int i = 0; i < 4; ++i) {
    if (first + i < n_keys) mine[i] = count[first + i];
    before[i] = mine[i];
  }
  block_scan(before);
  for (int i = 0; i < 4; ++i) {
    if (first + i >= n_keys) break;
    const std::int64_t at = block_sum[blockIdx.x] + before[i];
    offsets[first + i] = at;
    if (first + i + 1 == n_keys) offsets[n_keys] = at + mine[i];
    count[first + i] = 0;
    if (mine[i] > kLongList) long_list[atomicAdd(counters, 1u)] = static_cast<std::uint32_t>(first + i);
  }
}

/// Writes the entries of each token to their features' lists. One warp per token.
__global__ void scatter_entries(const std::int64_t* row_offsets, std::int64_t n_tokens, const std::uint32_t* key,
                                const std::int64_t* offsets, std::uint32_t* cursor, Entry* entry) {
  const std::int64_t token = blockIdx.x * static_cast<std::int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (token >= n_tokens) return;
  for (std::int64_t i = row_offsets[token] + threadIdx.x % kWarp; i < row_offsets[token + 1]; i += kWarp) {
    const std::uint32_t k = key[i];
    entry[offsets[k] + atomicAdd(cursor + k, 1u)] = {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(token)};
  }
}

__global__ void rank_entries(const std::int64_t* offsets, std::int64_t n_keys, const std::uint32_t* key,
                             const Entry* entry, std::uint32_t* token, std::uint32_t* position) {
  const std::int64_t total = offsets[n_keys];
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total; i += step) {
    const Entry mine = entry[i];
    const std::uint32_t k = key[mine.position];
    const std::int64_t begin = offsets[k];
    const std::uint32_t count = static_cast<std::uint32_t>(offsets[k + 1] - begin);
    if (count > kLongList) continue;
    std::uint32_t rank = 0;
    for (std::uint32_t j = 0; j < count; ++j) rank += entry[begin + j].position < mine.position ? 1u : 0u;
    token[begin + rank] = mine.token;
    position[begin + rank] = mine.position;
  }
}

/// Ranks the entries of each long list. One block per long list.
__global__ void __launch_bounds__(kScanThreads)
    rank_long(const std::int64_t* offsets, const Entry* entry, const std::uint32_t* counters,
              const std::uint32_t* long_list, std::int64_t n_tokens, int n_words, std::uint32_t* token,
              std::uint32_t* position) {
  extern __shared__ std::uint32_t shared[];
  std::uint32_t* bits = shared;              // [n_words] a bit for each token of the segment
  std::uint32_t* before = shared + n_words;  // [n_words] bits in the words before
  for (std::uint32_t item = blockIdx.x; item < *counters; item += gridDim.x) {
    const std::int64_t begin = offsets[long_list[item]], end = offsets[long_list[item] + std::int64_t{1}];
    std::int64_t earlier = begin;  // first place of this segment
    for (std::int64_t window = 0; window < n_tokens; window += kWindow) {
      for (int w = static_cast<int>(threadIdx.x); w < n_words; w += kScanThreads) bits[w] = 0;
      __syncthreads();
      for (std::int64_t i = begin + threadIdx.x; i < end; i += kScanThreads)
        if (const std::int64_t at = entry[i].token - window; at >= 0 && at < kWindow)
          atomicOr(bits + at / 32, 1u << at % 32);
      __syncthreads();
      const int each = (n_words + kScanThreads - 1) / kScanThreads;
      const int first = min(n_words, static_cast<int>(threadIdx.x) * each), last = min(n_words, first + each);
      std::uint32_t base[1] = {};
      for (int w = first; w < last; ++w) base[0] += __popc(bits[w]);
      const std::uint32_t of_window = block_scan(base);
      for (int w = first; w < last; ++w) {
        before[w] = base[0];
        base[0] += __popc(bits[w]);
      }
      __syncthreads();
      for (std::int64_t i = begin + threadIdx.x; i < end; i += kScanThreads) {
        const Entry mine = entry[i];
        const std::int64_t at = mine.token - window;
        if (at < 0 || at >= kWindow) continue;
        const std::uint32_t below = (1u << at % 32) - 1;
        const std::int64_t to = earlier + before[at / 32] + __popc(bits[at / 32] & below);
        token[to] = mine.token;
        position[to] = mine.position;
      }
      earlier += of_window;
      __syncthreads();
    }
  }
}

}  // namespace

std::int64_t transpose_workspace(Backend, std::int64_t n_keys, std::int64_t capacity) {
  return place(nullptr, n_keys, capacity, nullptr);
}

void transpose(const Execution& execution, const SparseActivations& a, FeatureHits hits, Array<std::byte> workspace) {
  const cudaStream_t queue = stream_of(execution);
  const std::int64_t n_keys = a.n_layers * a.n_features, capacity = a.key.size;
  Workspace w{};
  if (place(workspace.data, n_keys, capacity, &w) > workspace.size)
    throw Error(ExitCode::internal, "transpose: workspace is smaller than transpose_workspace");
  require(cudaMemsetAsync(w.cursor, 0, static_cast<std::size_t>(n_keys) * 4, queue), "cudaMemsetAsync");
  require(cudaMemsetAsync(w.counters, 0, 4, queue), "cudaMemsetAsync");
  const unsigned entry_blocks = blocks_for(capacity, kThreads, multiprocessors() * 16);
  const unsigned scan_blocks = blocks_for(n_keys, kScanBlock);
  count_hits<<<entry_blocks, kThreads, 0, queue>>>(a.row_offsets.data, a.n_tokens, a.key.data, w.cursor);
  sum_counts<<<scan_blocks, kScanThreads, 0, queue>>>(w.cursor, n_keys, w.block_sum);
  scan_in_one_block<<<1, kScanThreads, 0, queue>>>(w.block_sum, scan_blocks);
  write_offsets<<<scan_blocks, kScanThreads, 0, queue>>>(w.cursor, n_keys, w.block_sum, hits.offsets.data, w.counters,
                                                         w.long_list);
  scatter_entries<<<blocks_for(a.n_tokens, kThreads / kWarp), kThreads, 0, queue>>>(
      a.row_offsets.data, a.n_tokens, a.key.data, hits.offsets.data, w.cursor, w.entry);
  rank_entries<<<entry_blocks, kThreads, 0, queue>>>(hits.offsets.data, n_keys, a.key.data, w.entry, hits.token.data,
                                                     hits.position.data);
  const int n_words = static_cast<int>((std::min(a.n_tokens, kWindow) + 31) / 32), shared = n_words * 8;
  allow_shared_memory(reinterpret_cast<const void*>(rank_long), shared, "transpose");
  rank_long<<<multiprocessors() * 2, kScanThreads, shared, queue>>>(
      hits.offsets.data, w.entry, w.counters, w.long_list, a.n_tokens, n_words, hits.token.data, hits.position.data);
  require_launch("transpose");
}

}  // namespace weft::kernels::cuda
