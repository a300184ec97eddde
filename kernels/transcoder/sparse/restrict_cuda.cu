// SPDX-License-Identifier: Apache-2.0
//
// One warp per token in two passes: the first counts the entries to keep, the second, once the counts are offsets,
// copies them. Counts stay on the device. Limit: memory; 4 bytes per entry in the first pass (8 with bounds), 8 and the
// kept ones in the second.
#include "kernels/scan_cuda.cuh"
#include "kernels/transcoder/sparse/restrict.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// The lists of one group and the features to keep of them.
struct Lists {
  const std::int64_t* row_offsets;
  const std::uint32_t* key;
  const float* value;
  std::int64_t n_tokens;
  std::uint32_t n_features, first, kept;
  const float* bounds;  // by key; null: all values

  /// True if entry i is kept. Below `first` the difference wraps to a large number.
  __device__ bool keeps(std::int64_t i, std::uint32_t old) const {
    return old % n_features - first < kept && (bounds == nullptr || value[i] > bounds[old]);
  }
};

/// Sets counts[token] to the number of entries to keep.
__global__ void count_kept(const Lists from, std::int64_t* counts) {
  const std::int64_t token = blockIdx.x * static_cast<std::int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (token >= from.n_tokens) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int64_t end = from.row_offsets[token + 1];
  std::uint32_t count = 0;
  for (std::int64_t i = from.row_offsets[token] + lane; i < end; i += kWarp)
    count += from.keeps(i, from.key[i]) ? 1u : 0u;
  count = warp_sum(count);
  if (lane == 0) counts[token] = count;
}

/// Copies the kept entries, 32 at a time; the number kept in lower lanes gives the index of each.
__global__ void take_kept(const Lists from, const std::int64_t* offsets, std::uint32_t* key, float* value) {
  const std::int64_t token = blockIdx.x * static_cast<std::int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (token >= from.n_tokens) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int64_t end = from.row_offsets[token + 1];
  std::int64_t to = offsets[token];
  for (std::int64_t begin = from.row_offsets[token]; begin < end; begin += kWarp) {
    const std::int64_t i = begin + lane;
    const std::uint32_t old = i < end ? from.key[i] : 0;
    const bool keep = i < end && from.keeps(i, old);
    const std::uint32_t all = __ballot_sync(kAllLanes, keep);
    if (keep) {
      const std::int64_t at = to + __popc(all & ((1u << lane) - 1));
      key[at] = old / from.n_features * from.kept + (old % from.n_features - from.first);
      value[at] = from.value[i];
    }
    to += __popc(all);
  }
}

}  // namespace

void restrict_features(const Execution& execution, std::span<const SparseActivations> groups,
                       std::int64_t first_feature, SparseActivations out, Array<const float> bounds) {
  const cudaStream_t queue = stream_of(execution);
  const auto for_groups = [&](auto&& launch) {
    std::int64_t first_token = 0;
    for (const SparseActivations& group : groups) {
      const Lists from{group.row_offsets.data,
                       group.key.data,
                       group.value.data,
                       group.n_tokens,
                       static_cast<std::uint32_t>(group.n_features),
                       static_cast<std::uint32_t>(first_feature),
                       static_cast<std::uint32_t>(out.n_features),
                       bounds.data};
      if (group.n_tokens > 0)
        launch(blocks_for(group.n_tokens, kThreads / kWarp), from, out.row_offsets.data + first_token);
      first_token += group.n_tokens;
    }
  };
  require(cudaMemsetAsync(out.row_offsets.data + out.n_tokens, 0, 8, queue), "cudaMemsetAsync");
  for_groups([&](unsigned blocks, const Lists& from, std::int64_t* offsets) {
    count_kept<<<blocks, kThreads, 0, queue>>>(from, offsets);
  });
  scan_in_one_block<<<1, kScanThreads, 0, queue>>>(out.row_offsets.data, out.n_tokens + 1);
  for_groups([&](unsigned blocks, const Lists& from, std::int64_t* offsets) {
    take_kept<<<blocks, kThreads, 0, queue>>>(from, offsets, out.key.data, out.value.data);
  });
  require_launch("restrict_features");
}

}  // namespace weft::kernels::cuda
