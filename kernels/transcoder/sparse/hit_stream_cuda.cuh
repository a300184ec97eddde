// SPDX-License-Identifier: Apache-2.0
//
// The hits of all features in the order in which the stream (feature_stream_cuda.cuh) reads them, and its constants.
#pragma once

#include "kernels/constants.hpp"
#include "kernels/optimize/adam_cuda.cuh"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "kernels/workspace.hpp"

namespace weft::kernels::cuda {

constexpr int kItemFeatures = 32;
constexpr std::uint32_t kHotHits = 64;

/// One hit in the layout of the stream.
struct Hit {
  std::uint32_t token;
  float value;
};
struct HotFeature {
  std::uint32_t key, begin, count;  // begin: index in the regrouped list
};

/// The regrouped hits: within each block of 32 features first the hits of the cold features, then those of the hot
/// ones, features ascending in both.
struct HitStream {
  Hit* hit;                 // [capacity]
  std::uint32_t* position;  // [capacity] CSR position
  std::uint32_t* begin;     // [L * F] first hit of the feature in this list
  std::uint32_t* cold_end;  // [L * blocks * 32] end of the feature's cold hits, from the first hit of its 32 features
  std::uint32_t* hot_mask;  // [L * blocks]
  HotFeature* hot;          // [capacity / (kHotHits + 1)]
  std::uint32_t* n_hot;
  std::uint32_t* next_item;  // items after the first of each warp
  float* partial;            // [slots, capacity] dot products by (target, column group)
  AdamRate* rate;            // the step's constants, before they are copied to constant memory
  float* norm;               // [units, F] sums of squares of dW
  float* weight_square;      // [units, F] sums of squares of the new weights; null: not formed
  float* value_sum;          // [L * F] sums of the hits' values (encoder: the bias gradients)
  std::int64_t capacity;
  std::int64_t blocks;  // blocks of 32 features in a layer
};

/// Cuts `workspace` into a HitStream; with data == nullptr only counts bytes.
inline std::int64_t place_stream(std::byte* data, std::int64_t n_layers, std::int64_t n_features, std::int64_t capacity,
                                 std::int64_t slots, std::int64_t units, bool weight_squares, HitStream* stream) {
  const std::int64_t blocks = (n_features + kItemFeatures - 1) / kItemFeatures;
  kernels::Workspace layout(data);
  const auto take = [&](auto*& pointer, std::int64_t count) {
    pointer = layout.take<std::remove_reference_t<decltype(*pointer)>>(count).data;
  };
  HitStream s{};
  s.capacity = capacity;
  s.blocks = blocks;
  take(s.n_hot, 1);
  take(s.next_item, 1);
  take(s.rate, 1);
  take(s.hit, capacity);
  take(s.position, capacity);
  take(s.begin, n_layers * n_features);
  take(s.cold_end, n_layers * blocks * kItemFeatures);
  take(s.hot_mask, n_layers * blocks);
  take(s.hot, capacity / (kHotHits + 1) + 1);
  take(s.partial, slots * capacity);
  take(s.norm, units * n_features);
  if (weight_squares) take(s.weight_square, units * n_features);
  take(s.value_sum, n_layers * n_features);
  if (stream != nullptr) *stream = s;
  return layout.bytes();
}

/// The step's constants, in constant memory: instructions read them as operands, which saves thirty registers.
static __constant__ AdamRate constant_rate;

/// Computes the places of the hits of 32 features per warp.
static __global__ void plan_stream(const std::int64_t* offsets, std::int64_t n_layers, std::int64_t n_features,
                                   const AdamStep* step, HitStream stream) {
  const std::int64_t block = blockIdx.x * static_cast<std::int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  if (step != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *stream.rate = adam_rate(*step);
  if (block >= n_layers * stream.blocks) return;
  const std::int64_t layer = block / stream.blocks, first = block % stream.blocks * kItemFeatures;
  const std::int64_t feature = first + lane;
  const std::int64_t key = layer * n_features + (feature < n_features ? feature : n_features);
  const std::int64_t begin = offsets[key];
  const std::int64_t end = feature < n_features ? offsets[key + 1] : begin;
  const std::uint32_t count = static_cast<std::uint32_t>(end - begin);
  const bool hot = count > kHotHits;
  const std::uint32_t cold = hot ? 0 : count;
  const std::uint32_t cold_begin = warp_exclusive_sum(cold, lane);
  const std::uint32_t cold_total = __shfl_sync(kAllLanes, cold_begin + cold, kWarp - 1);
  const std::uint32_t hot_begin = warp_exclusive_sum(hot ? count : 0, lane);
  const std::uint32_t base = static_cast<std::uint32_t>(__shfl_sync(kAllLanes, begin, 0));
  const std::uint32_t mask = __ballot_sync(kAllLanes, hot);
  const std::uint32_t regrouped = base + (hot ? cold_total + hot_begin : cold_begin);
  stream.cold_end[block * kItemFeatures + lane] = cold_begin + cold;
  if (lane == 0) stream.hot_mask[block] = mask;
  if (feature < n_features) stream.begin[key] = regrouped;
  if (hot) {
    // The order of this list affects scheduling only, never a sum.
    const std::uint32_t at = atomicAdd(stream.n_hot, 1u);
    stream.hot[at] = {static_cast<std::uint32_t>(key), regrouped, count};
  }
}

/// Writes (token, value) of each hit to its place. One thread per hit.
static __global__ void fill_stream(const std::int64_t* offsets, std::int64_t n_keys, const std::uint32_t* token,
                                   const std::uint32_t* position, const std::uint32_t* keys, const float* value,
                                   std::int64_t n_features, HitStream stream) {
  const std::int64_t total = offsets[n_keys];
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total; i += step) {
    const std::uint32_t at = position[i];
    const std::uint32_t key = keys[at];
    const std::int64_t block = key / n_features * stream.blocks + key % n_features / kItemFeatures;
    std::int64_t to = i;
    if (stream.hot_mask[block] != 0) to = stream.begin[key] + (i - offsets[key]);
    stream.hit[to] = {token[i], value[at]};
    stream.position[to] = at;
  }
}

/// Runs plan_stream and fill_stream; `value` by CSR position. Not inline: each translation unit has a constant_rate of
/// its own, and the linker would keep one of several inline definitions, which would fill that of another unit.
static void prepare_stream(cudaStream_t queue, const SparseActivations& activations, const FeatureHits& hits,
                           const float* value, const AdamStep* step, const HitStream& stream) {
  const std::int64_t n_keys = activations.n_layers * activations.n_features;
  require(cudaMemsetAsync(stream.n_hot, 0, sizeof(std::uint32_t), queue), "cudaMemsetAsync");
  plan_stream<<<blocks_for(activations.n_layers * stream.blocks, 8), 256, 0, queue>>>(
      hits.offsets.data, activations.n_layers, activations.n_features, step, stream);
  if (step != nullptr)
    require(cudaMemcpyToSymbolAsync(constant_rate, stream.rate, sizeof(AdamRate), 0, cudaMemcpyDeviceToDevice, queue),
            "prepare_stream");
  fill_stream<<<blocks_for(stream.capacity, 256, multiprocessors() * 16), 256, 0, queue>>>(
      hits.offsets.data, n_keys, hits.token.data, hits.position.data, activations.key.data, value,
      activations.n_features, stream);
  require_launch("prepare_stream");
}

}  // namespace weft::kernels::cuda
