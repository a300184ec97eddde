// SPDX-License-Identifier: Apache-2.0
//
// y[n, t] = sum of the active features' strips, token-major: one warp per (token, target, group of columns).
//
// Limit: L2. All tokens of a (target, group) are resident at once and walk the sources together, so that the slab of
// weights in use (one source's features, one group of columns) is read from memory once and from L2 afterwards. More
// tokens than that are processed block by block. Deeper prefetch or more warps would widen the slab beyond L2.
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/sparse/feature_stream_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kForwardWarps = 8;
constexpr int kForwardBlocks = 4;  // resident per multiprocessor

struct ForwardArguments {
  const std::int64_t* offsets;  // first: that of token_begin
  const std::uint32_t* key;
  const float* value;
  std::int64_t n_tokens, n_features, tokens_at_once;
  int n_layers, target_begin, n_targets, d_model, groups;
  void* y;
  std::int64_t y_stride;
  bool y_is_bf16;
  bool cross_layer;
  const std::uint16_t* weight[kMostLayers];
};

/// Number of strips of a feature of source layer s.
__device__ __forceinline__ int strips_of(const ForwardArguments& a, int source) {
  return a.cross_layer ? a.n_layers - source : 1;
}

/// First entry of a token that writes to the target: of any source layer, or of the target's layer if the decoder is
/// per layer.
__device__ __forceinline__ std::int64_t first_entry(const ForwardArguments& a, std::int64_t at, std::int64_t end,
                                                    int target) {
  if (a.cross_layer) return at;
  const std::int64_t key = target * a.n_features;
  while (at < end) {
    const std::int64_t middle = at + (end - at) / 2;
    if (__ldg(a.key + middle) < key)
      at = middle + 1;
    else
      end = middle;
  }
  return at;
}

/// Up to 32 entries of a token's list, one per lane: the start of the strip's segment for the target, and the
/// activation.
struct EntryWindow {
  const std::uint16_t* from;
  float value;
};
__device__ __forceinline__ EntryWindow entry_window(const ForwardArguments& a, std::int64_t at, std::int64_t end,
                                                    int target, int lane, int& count) {
  EntryWindow entry{nullptr, 0.0f};
  bool inside = at + lane < end;
  if (inside) {
    const std::uint32_t key = __ldg(a.key + at + lane);
    const std::uint32_t features = static_cast<std::uint32_t>(a.n_features);
    const int source = static_cast<int>(key / features);
    inside = source <= target;
    if (inside) {
      const std::int64_t feature = key - source * features;
      entry.from = a.weight[source] + (feature * strips_of(a, source) + (target - source)) * a.d_model;
      entry.value = __ldg(a.value + at + lane);
    }
  }
  count = __popc(__ballot_sync(kAllLanes, inside));  // sources ascend: the entries inside come first
  return entry;
}

template <int kChunks, bool kFull, int kRows>
__global__ void __launch_bounds__(kForwardWarps* kWarp, kForwardBlocks)
    forward_tokens(const __grid_constant__ ForwardArguments a) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  // Targets vary fastest within a block of tokens: blockIdx.y = (token block, target, group).
  const int unit = static_cast<int>(blockIdx.y % (a.n_targets * a.groups));
  const std::int64_t first_token = static_cast<std::int64_t>(blockIdx.y / (a.n_targets * a.groups)) * a.tokens_at_once;
  const std::int64_t within = static_cast<std::int64_t>(blockIdx.x) * kForwardWarps + threadIdx.x / kWarp;
  const std::int64_t token = first_token + within;
  if (within >= a.tokens_at_once || token >= a.n_tokens) return;
  const int place = a.n_targets - 1 - unit / a.groups;  // long sums first
  const int target = a.target_begin + place;
  const int inside = (unit % a.groups) * kChunks * kBlockColumns + lane * kLaneColumns;

  float sum[kChunks * 8] = {};
  const std::int64_t end = __ldg(a.offsets + token + 1);
  std::int64_t at = first_entry(a, __ldg(a.offsets + token), end, target);
  int count = 0, count_ahead = 0;
  EntryWindow now = entry_window(a, at, end, target, lane, count);
  while (count > 0) {
    EntryWindow ahead{nullptr, 0.0f};
    count_ahead = 0;
    if (count == kWarp) ahead = entry_window(a, at + kWarp, end, target, lane, count_ahead);
    for (int j = 0; j < count; j += kRows) {
      uint4 word[kRows][kChunks];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (j + i < count) {
          const std::uint16_t* from = reinterpret_cast<const std::uint16_t*>(__shfl_sync(
                                          kAllLanes, reinterpret_cast<unsigned long long>(now.from), j + i)) +
                                      inside;
#pragma unroll
          for (int c = 0; c < kChunks; ++c)
            if (kFull || inside + c * kBlockColumns < a.d_model)
              word[i][c] = __ldg(reinterpret_cast<const uint4*>(from + c * kBlockColumns));
            else
              word[i][c] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (j + i < count) {
          const float value = __shfl_sync(kAllLanes, now.value, j + i);
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            float w[8];
            unpack8(word[i][c], w);
#pragma unroll
            for (int k = 0; k < 8; ++k) sum[c * 8 + k] = fmaf(value, w[k], sum[c * 8 + k]);
          }
        }
    }
    at += kWarp;
    now = ahead;
    count = count_ahead;
  }
  const std::int64_t to = token * a.y_stride + static_cast<std::int64_t>(place) * a.d_model + inside;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!kFull && inside + c * kBlockColumns >= a.d_model) continue;
    float part[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) part[k] = sum[c * 8 + k];
    if (a.y_is_bf16) {
      __stcs(reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(a.y) + to + c * kBlockColumns), pack8(part));
    } else {
      float4* y = reinterpret_cast<float4*>(static_cast<float*>(a.y) + to + c * kBlockColumns);
      __stcs(y, make_float4(part[0], part[1], part[2], part[3]));
      __stcs(y + 1, make_float4(part[4], part[5], part[6], part[7]));
    }
  }
}

/// Forward pass for any width: one warp per (token, 256 columns of a target).
__global__ void forward_any(const __grid_constant__ ForwardArguments a) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kForwardWarps + threadIdx.x / kWarp;
  if (token >= a.n_tokens) return;
  const int place = static_cast<int>(blockIdx.y) / a.groups, target = a.target_begin + place;
  const int first = static_cast<int>(blockIdx.y) % a.groups * static_cast<int>(kBlockColumns);
  float sum[kLaneColumns] = {};
  const std::int64_t end = a.offsets[token + 1];
  for (std::int64_t entry = first_entry(a, a.offsets[token], end, target); entry < end; ++entry) {
    const std::int64_t source = a.key[entry] / a.n_features, feature = a.key[entry] % a.n_features;
    if (source > target) break;
    const float value = a.value[entry];
    const std::uint16_t* from =
        a.weight[source] + (feature * strips_of(a, static_cast<int>(source)) + target - source) * a.d_model;
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) {
      const int c = first + lane + kWarp * j;
      if (c < a.d_model) sum[j] += value * static_cast<float>(bf16{from[c]});
    }
  }
#pragma unroll
  for (int j = 0; j < kLaneColumns; ++j) {
    const int c = first + lane + kWarp * j;
    if (c < a.d_model)
      store_element(a.y, a.y_is_bf16 ? Scalar::bf16 : Scalar::fp32,
                    token * a.y_stride + static_cast<std::int64_t>(place) * a.d_model + c, sum[j]);
  }
}

}  // namespace

void decode_forward(const Execution& execution, const SparseActivations& activations, std::int64_t token_begin,
                    std::int64_t token_count, std::span<const ParameterRows> decoder, std::int64_t target_begin,
                    AnyMatrix y) {
  if (token_count == 0 || y.columns == 0) return;
  require_layers("decode_forward", decoder.size());
  ForwardArguments a{};
  a.offsets = activations.row_offsets.data + token_begin;
  a.key = activations.key.data;
  a.value = activations.value.data;
  a.n_tokens = token_count;
  a.n_features = activations.n_features;
  a.n_layers = static_cast<int>(decoder.size());
  a.d_model = static_cast<int>(decoder[0].segment);
  a.target_begin = static_cast<int>(target_begin);
  a.n_targets = static_cast<int>(y.columns / a.d_model);
  a.y = y.data;
  a.y_stride = y.stride;
  a.y_is_bf16 = y.type == Scalar::bf16;
  a.cross_layer = is_cross_layer(decoder);
  bool vector = a.d_model % kLaneColumns == 0 && y.stride % kLaneColumns == 0 && is_aligned(y.data, 16);
  for (std::size_t s = 0; s < decoder.size(); ++s) {
    require_cuda_storage(decoder[s]);
    a.weight[s] = static_cast<const std::uint16_t*>(decoder[s].weight);
    vector = vector && is_aligned(decoder[s].weight, 16);
  }
  const cudaStream_t queue = stream_of(execution);
  if (!vector) {
    a.groups = static_cast<int>((a.d_model + kBlockColumns - 1) / kBlockColumns);
    forward_any<<<dim3(blocks_for(token_count, kForwardWarps), a.n_targets * a.groups), kForwardWarps * kWarp, 0,
                  queue>>>(a);
    require_launch("decode_forward");
    return;
  }
  const Grouping grouping = grouping_of(a.d_model);
  a.groups = grouping.groups;
  // A block has at most as many tokens as are resident on the GPU together; blocks are of about equal size.
  const std::int64_t most = static_cast<std::int64_t>(multiprocessors()) * kForwardBlocks * kForwardWarps;
  const std::int64_t blocks = (token_count + most - 1) / most;
  a.tokens_at_once = (token_count + blocks - 1) / blocks;
  const dim3 grid(blocks_for(a.tokens_at_once, kForwardWarps), static_cast<unsigned>(blocks * a.n_targets * a.groups));
  if (grid.y > 65535) throw Error(ExitCode::usage, "decode_forward: too many tokens for one call");
  if (!grouping.full)
    forward_tokens<2, false, 2><<<grid, kForwardWarps * kWarp, 0, queue>>>(a);
  else if (grouping.chunks == 2)
    forward_tokens<2, true, 2><<<grid, kForwardWarps * kWarp, 0, queue>>>(a);
  else if (grouping.chunks == 3)
    forward_tokens<3, true, 1><<<grid, kForwardWarps * kWarp, 0, queue>>>(a);
  else
    forward_tokens<4, true, 1><<<grid, kForwardWarps * kWarp, 0, queue>>>(a);
  require_launch("decode_forward");
}

}  // namespace weft::kernels::cuda
