// SPDX-License-Identifier: Apache-2.0
//
// Feature-major backward pass fused with Adam, as a stream: shared by the decoder and the encoder.
//
// For every row of a parameter matrix and every group of `chunks * 256` of its columns: read the weights once, walk the
// feature's hits, and for each hit its row of `rows` (gradient rows or inputs): dot product with the weights (decoder:
// the activation gradient), scaled sum (dW, in registers), then Adam in place.
//
// Work distribution. An item is 32 consecutive features of one (source, target, column group). Their hits are one
// contiguous list, so the rows flow through a private ring in shared memory (cp.async, one group per row; each lane
// copies and reads back its own 16 bytes: no barrier) without a pause between features: with four hits per feature on
// average, a warp that restarted for each feature would spend most of its time on the latency of offsets -> list ->
// row. Persistent warps take items from a counter. Items go target by target, so that the [N, columns] slab of `rows`
// in use stays in L2. A hot feature (more than kHotHits hits) is processed by a whole block, hits split evenly over its
// warps, dW summed over the warps in their order. The assignment of items to warps changes no sum: every result has one
// owner and a fixed order.
//
// State. With 8-bit storage, weights and moments also pass through shared memory, two features ahead, by the copy
// engine of the multiprocessor (StateStages), so that the registers suffice for 16 warps. With the other storage types,
// whose moments would need more shared memory than there is for as many warps, the weights are loaded one feature ahead
// into registers.
//
// Limit: L2. The rows gathered (512 B x chunks per hit) and the state (8 to 24 B per parameter) both pass through it.
#pragma once

#include "kernels/constants.hpp"
#include "kernels/optimize/adam_cuda.cuh"
#include "kernels/optimize/row_noise_cuda.cuh"
#include "kernels/peers/peers_cuda.hpp"
#include "kernels/transcoder/sparse/hit_stream_cuda.cuh"
#include "kernels/transcoder/sparse/stream_memory_cuda.cuh"

namespace weft::kernels::cuda {

/// Columns that a warp holds at once, in chunks of 256, and the number of such groups per target. `full`: no lane is
/// ever past the end of a target, so no check is needed.
struct Grouping {
  int chunks;
  int groups;
  bool full;
};
inline Grouping grouping_of(std::int64_t d_model) {
  for (const int chunks : {3, 4, 2})
    if (d_model % (chunks * kBlockColumns) == 0)
      return {chunks, static_cast<int>(d_model / (chunks * kBlockColumns)), true};
  return {2, static_cast<int>((d_model + 2 * kBlockColumns - 1) / (2 * kBlockColumns)), false};
}

// ---- norms of rows

/// Sum of the squares of the eight weights of a lane. The norm of a row adds, in fp32 and in this order: these sums
/// of the chunks of a column group, of all lanes (warp_sum), of the groups and targets. Every kernel that forms a norm
/// in this order gives the same bits.
template <StorageType storage>
__device__ __forceinline__ float square_of(const LaneState<storage>& state) {
  float w[8];
  unpack8(state.weight, w);
  if constexpr (storage == StorageType::fp32) {
    const std::uint32_t rest[4] = {state.rest.x, state.rest.y, state.rest.z, state.rest.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto low = static_cast<std::int16_t>(i % 2 == 0 ? rest[i / 2] & 0xffffu : rest[i / 2] >> 16);
      w[i] = __uint_as_float(__float_as_uint(w[i]) + static_cast<std::uint32_t>(static_cast<std::int32_t>(low)));
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(w[i], w[i], sum);
  return sum;
}

// ---- the stream

struct StreamArguments {
  HitStream stream;
  const std::int64_t* offsets;  // [L * F + 1]
  const char* rows;             // bf16
  std::int64_t row_bytes;
  std::int64_t n_features;
  std::int64_t first_row;                 // global index of row 0; with noise
  std::int64_t target_begin, target_end;  // targets of the launch
  std::int64_t first_item, items;         // range of items of these targets, of units * blocks
  int n_layers;
  int d_model;
  int groups;
  bool with_norm;
  const AdamStep* step;  // null: no update
  StatePointers layer[kMostLayers];
};

/// Meaning of the rows of the stream: gradient rows of a cross-layer decoder or of a decoder per layer, which are
/// dotted with the weights, or inputs of an encoder, whose entries' values are summed.
enum class StreamKind { encoder, cross_layer, per_layer };

/// (source, target, column group) of a unit; units are ordered by target. A cross-layer decoder has a unit for each
/// source up to the target, an encoder and decoders per layer only source = target.
struct Unit {
  int source, target, group;
};
template <StreamKind kind>
__device__ __forceinline__ Unit unit_of(std::int64_t index, int groups) {
  const int pair = static_cast<int>(index / groups), group = static_cast<int>(index % groups);
  if constexpr (kind != StreamKind::cross_layer) return {pair, pair, group};
  int target = static_cast<int>((sqrtf(8.0f * static_cast<float>(pair) + 1.0f) - 1.0f) * 0.5f);
  while ((target + 1) * (target + 2) / 2 <= pair) ++target;
  while (target * (target + 1) / 2 > pair) --target;
  return {pair - target * (target + 1) / 2, target, group};
}

template <StorageType storage, int kChunks, bool kFull, int kRing, int kWarps, int kBlocks, StreamKind kKind,
          bool kUpdate, int kStages, class Epilogue>
__global__ void __launch_bounds__(kWarps* kWarp, kBlocks)
    stream_features(const __grid_constant__ StreamArguments a, const __grid_constant__ Epilogue epilogue) {
  // The flag in constant_rate may be outdated: the step may have been withheld since (kernels/peers/peers_cuda.hpp).
  if constexpr (kUpdate)
    if (a.step->withheld != 0) return;
  using Rows = RowStream<kChunks, kRing, kKind != StreamKind::encoder, kFull>;
  using Stages = StateStages<kChunks, kStages>;
  constexpr bool kCross = kKind == StreamKind::cross_layer, kDots = kKind != StreamKind::encoder;
  constexpr bool kStaged = kStages > 0;
  // Weights may be absent without dots: the norm of an encoder's gradient needs none.
  constexpr bool kWeights = kDots || kUpdate || Epilogue::kHasExtra;
  // An extra gradient that depends on the norms of rows needs them again in the next step.
  constexpr bool kSquares = kUpdate && Epilogue::kHasExtra;
  static_assert(!kSquares || kChunks <= kWarps);
  static_assert(!kStaged || (storage == StorageType::eight_bit && kFull && kUpdate));
  constexpr int kOwnBytes = kRing * Rows::kRowBytes + Stages::kBytes + Rows::kDotBytes;
  extern __shared__ __align__(16) char shared[];
  __shared__ float warp_value_sum[kWarps];
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  char* own = shared + warp * kOwnBytes;
  const int segment_blocks = (a.d_model + kBlockColumns - 1) / kBlockColumns;

  Rows rows;
  rows.ring = static_cast<std::uint32_t>(__cvta_generic_to_shared(own)) + lane * 16;
  rows.dots = reinterpret_cast<float*>(own + kRing * Rows::kRowBytes + Stages::kBytes);
  rows.row_bytes = a.row_bytes;
  rows.lane = lane;
  Stages stages;
  if constexpr (kStaged)
    stages.start(own + kRing * Rows::kRowBytes, shared + kWarps * kOwnBytes + warp * kStages * 8, lane);

  // Values that depend on the unit: the row geometry of its source and this lane's first column.
  std::int64_t columns = 0, column = 0, row_blocks = 0, block_column = 0;
  const auto enter = [&](const Unit& unit) {
    columns = static_cast<std::int64_t>(kCross ? a.n_layers - unit.source : 1) * a.d_model;
    const int inside = unit.group * kChunks * kBlockColumns + lane * kLaneColumns;
    column = static_cast<std::int64_t>(kCross ? unit.target - unit.source : 0) * a.d_model + inside;
    row_blocks = static_cast<std::int64_t>(kCross ? a.n_layers - unit.source : 1) * segment_blocks;
    block_column =
        static_cast<std::int64_t>(kCross ? unit.target - unit.source : 0) * segment_blocks + unit.group * kChunks;
    rows.rows = a.rows + (static_cast<std::int64_t>(unit.target) * a.d_model + inside) * 2;
    if constexpr (!kFull) {
      rows.live = 0;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        if (inside + c * kBlockColumns < a.d_model) rows.live |= 1u << c;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        if (!(rows.live >> c & 1))
          for (int i = 0; i < kRing; ++i)
            *reinterpret_cast<uint4*>(own + i * Rows::kRowBytes + c * 512 + lane * 16) = make_uint4(0, 0, 0, 0);
    }
  };
  const auto live = [&](int c) { return kFull || (rows.live >> c & 1) != 0; };

  // 1. Hot features, one block each.
  const std::int64_t n_hot = *a.stream.n_hot, of_target = n_hot * a.groups;
  for (std::int64_t item = a.target_begin * of_target + blockIdx.x; item < a.target_end * of_target;
       item += gridDim.x) {
    const HotFeature hot = a.stream.hot[item % n_hot];
    const int source = static_cast<int>(hot.key / a.n_features);
    const std::int64_t row = hot.key % a.n_features;
    const int target = static_cast<int>(item / n_hot / a.groups);
    if (kCross ? target < source : target != source) continue;
    const Unit unit{source, target, static_cast<int>(item / n_hot % a.groups)};
    enter(unit);
    const StatePointers& p = a.layer[source];
    const std::int64_t at = row * columns + column;
    float weight[kChunks * 8], sum[kChunks * 8];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float w[8] = {};
      if (kDots && live(c)) unpack8(load_weight(p, at + c * kBlockColumns), w);
#pragma unroll
      for (int i = 0; i < 8; ++i) weight[c * 8 + i] = w[i], sum[c * 8 + i] = 0.0f;
    }
    const int count = static_cast<int>(hot.count);
    const int each = ((count + kWarps - 1) / kWarps + kWarp - 1) / kWarp * kWarp;
    const int begin = min(count, warp * each), end = min(count, begin + each);
    rows.hits = a.stream.hit + hot.begin + begin;
    rows.out = a.stream.partial + (static_cast<std::int64_t>(target) * a.groups + unit.group) * a.stream.capacity +
               hot.begin + begin;
    rows.total = end - begin;
    rows.start();
    rows.value_sum = 0.0f;
    rows.run(rows.total, weight, sum);
    wait_copies<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);  // [kWarps][kChunks * 256], where the rings were
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        *reinterpret_cast<float4*>(sums + (warp * kChunks + c) * kBlockColumns + lane * 8 + i) =
            make_float4(sum[c * 8 + i], sum[c * 8 + i + 1], sum[c * 8 + i + 2], sum[c * 8 + i + 3]);
    __syncthreads();
    if constexpr (!kDots) {
      if (unit.group == 0) {
        if (lane == 0) warp_value_sum[warp] = rows.value_sum;
        __syncthreads();
        if (threadIdx.x == 0) {
          float all = 0.0f;
          for (int other = 0; other < kWarps; ++other) all += warp_value_sum[other];
          a.stream.value_sum[hot.key] = all;
        }
      }
    }
    float square = 0.0f, weight_square = 0.0f;
#pragma unroll
    for (int c0 = 0; c0 < kChunks; c0 += kWarps) {
      const int c = c0 + warp;
      if (c >= kChunks || (!kFull && unit.group * kChunks + c >= segment_blocks)) continue;
      float g[8] = {};
#pragma unroll
      for (int other = 0; other < kWarps; ++other)
#pragma unroll
        for (int i = 0; i < 8; ++i) g[i] += sums[(other * kChunks + c) * kBlockColumns + lane * 8 + i];
      if constexpr (Epilogue::kHasExtra)
        if (live(c)) {
          float w[8];
          unpack8(load_weight(p, at + c * kBlockColumns), w);
#pragma unroll
          for (int i = 0; i < 8; ++i) g[i] += epilogue.extra(epilogue.extra.row(hot.key), w[i]);
        }
      if constexpr (Epilogue::kHasNoise)
        if (live(c)) {
          const std::int64_t local = at + c * kBlockColumns;
          add_noise8(epilogue.noise, source, static_cast<std::uint64_t>(a.first_row * columns + local), local, g);
        }
#pragma unroll
      for (int i = 0; i < 8; ++i) square = fmaf(g[i], g[i], square);
      if constexpr (kUpdate) {
        LaneState<storage> state{};
        const std::int64_t block = row * row_blocks + block_column + c;
        if constexpr (storage == StorageType::eight_bit) {
          state.first_scale = p.first_scale[block];
          state.second_scale = p.second_scale[block];
        }
        const std::int64_t here = at + c * kBlockColumns;
        if (live(c)) {
          state.weight = load_weight(p, here);
          load_moments(state, p, here);
        }
        const bool moments =
            update8(epilogue.rule, state, g, constant_rate, p.first_element + static_cast<std::uint64_t>(here));
        if (live(c)) store_state(state, p, here, moments);
        if constexpr (kSquares)
          if (live(c)) weight_square = square_of(state);
        if constexpr (storage == StorageType::eight_bit)
          if (lane == 0) {
            p.first_scale[block] = state.first_scale;
            p.second_scale[block] = state.second_scale;
          }
      }
    }
    const std::int64_t pair = kCross ? static_cast<std::int64_t>(target) * (target + 1) / 2 + source : source;
    const std::int64_t of_row = (pair * a.groups + unit.group) * a.n_features + row;
    if constexpr (kSquares) {
      __syncthreads();
      if (warp < kChunks) sums[warp * kWarp + lane] = weight_square;
      __syncthreads();
      if (warp == 0 && a.stream.weight_square != nullptr) {
        float all = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) all += sums[c * kWarp + lane];
        all = warp_sum(all);
        if (lane == 0) a.stream.weight_square[of_row] = all;
      }
    }
    if (a.with_norm) {
      __syncthreads();
      square = warp_sum(square);
      if (lane == 0) sums[warp] = square;
      __syncthreads();
      if (threadIdx.x == 0) {
        float all = 0.0f;
        for (int other = 0; other < kWarps; ++other) all += sums[other];
        a.stream.norm[of_row] = all;
      }
    }
    __syncthreads();
  }

  // 2. All other features, one item per warp at a time.
  if constexpr (kStaged) fence_shared_for_copies();
  const std::uint32_t first_item = static_cast<std::uint32_t>(a.first_item);
  std::uint32_t item = first_item + blockIdx.x * kWarps + warp;
  while (item < a.items) {
    std::uint32_t next_item = 0;
    if (lane == 0) next_item = first_item + gridDim.x * kWarps + atomicAdd(a.stream.next_item, 1u);
    const std::int64_t unit_index = item / a.stream.blocks, block = item % a.stream.blocks;
    const Unit unit = unit_of<kKind>(unit_index, a.groups);
    enter(unit);
    const StatePointers& p = a.layer[unit.source];
    const std::int64_t first = block * kItemFeatures;
    const int count = static_cast<int>(min(static_cast<std::int64_t>(kItemFeatures), a.n_features - first));
    const std::int64_t layer_block = unit.source * a.stream.blocks + block;
    const std::uint32_t cold_end = __ldg(a.stream.cold_end + layer_block * kItemFeatures + lane);
    const std::uint32_t hot_mask = __ldg(a.stream.hot_mask + layer_block);
    const std::int64_t base = __ldg(a.offsets + unit.source * a.n_features + first);
    std::int64_t at = first * columns + column;

    uint4 ahead[kChunks];
    if constexpr (kStaged) {
#pragma unroll
      for (int i = 0; i < kStages; ++i)
        if (i < count) stages.request(p, at + i * columns);
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        ahead[c] = make_uint4(0, 0, 0, 0);
        if constexpr (kWeights)
          if (live(c)) ahead[c] = load_weight(p, at + c * kBlockColumns);
      }
    }
    rows.hits = a.stream.hit + base;
    rows.out =
        a.stream.partial + (static_cast<std::int64_t>(unit.target) * a.groups + unit.group) * a.stream.capacity + base;
    rows.total = static_cast<int>(__shfl_sync(kAllLanes, cold_end, kItemFeatures - 1));
    rows.start();

    // Lane i keeps the block scales of feature i: whole sectors, once per item.
    constexpr int kScales = kUpdate && storage == StorageType::eight_bit ? kChunks : 1;
    float first_scale[kScales] = {}, second_scale[kScales] = {};
    const std::int64_t scale_at = (first + lane) * row_blocks + block_column;
    const bool owns_scales = kUpdate && storage == StorageType::eight_bit && lane < count && !(hot_mask >> lane & 1);
    if (owns_scales) {
#pragma unroll
      for (int c = 0; c < kScales; ++c)
        if (kFull || unit.group * kChunks + c < segment_blocks) {
          first_scale[c] = p.first_scale[scale_at + c];
          second_scale[c] = p.second_scale[scale_at + c];
        }
    }

    // Lane i also keeps the factor of feature i for the extra gradient.
    [[maybe_unused]] float of_row = 0.0f;
    if constexpr (Epilogue::kHasExtra)
      if (lane < count) of_row = epilogue.extra.row(unit.source * a.n_features + first + lane);

#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      LaneState<storage> state[kChunks];
      if constexpr (kStaged) {
        stages.wait();
#pragma unroll
        for (int c = 0; c < kChunks; ++c) state[c].weight = stages.weight(c);
      } else {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          state[c] = {};
          state[c].weight = ahead[c];
          if (kUpdate && live(c)) load_moments(state[c], p, at + c * kBlockColumns);
        }
        if constexpr (kWeights)
          if (i + 1 < count) {
#pragma unroll
            for (int c = 0; c < kChunks; ++c)
              if (live(c)) ahead[c] = load_weight(p, at + columns + c * kBlockColumns);
          }
      }
      float weight[kChunks * 8], sum[kChunks * 8];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float w[8];
        unpack8(state[c].weight, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) weight[c * 8 + j] = w[j], sum[c * 8 + j] = 0.0f;
      }
      rows.value_sum = 0.0f;
      rows.run(static_cast<int>(__shfl_sync(kAllLanes, cold_end, i)), weight, sum);
      if (!(hot_mask >> i & 1)) {
        if constexpr (Epilogue::kHasExtra) {
          const float of_this = __shfl_sync(kAllLanes, of_row, i);
#pragma unroll
          for (int j = 0; j < kChunks * 8; ++j)
            if (live(j / 8)) sum[j] += epilogue.extra(of_this, weight[j]);
        }
        if constexpr (Epilogue::kHasNoise) {
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            if (!live(c)) continue;
            const std::int64_t local = at + c * kBlockColumns;
            float g[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) g[j] = sum[c * 8 + j];
            add_noise8(epilogue.noise, unit.source, static_cast<std::uint64_t>(a.first_row * columns + local), local,
                       g);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[c * 8 + j] = g[j];
          }
        }
        if constexpr (!kDots)
          if (lane == 0 && unit.group == 0) a.stream.value_sum[unit.source * a.n_features + first + i] = rows.value_sum;
        if (a.with_norm) {
          float square = 0.0f;
#pragma unroll
          for (int j = 0; j < kChunks * 8; ++j) square = fmaf(sum[j], sum[j], square);
          square = warp_sum(square);
          if (lane == 0) a.stream.norm[unit_index * a.n_features + first + i] = square;
        }
        if constexpr (kUpdate) {
          [[maybe_unused]] float weight_square = 0.0f;
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            if constexpr (kStaged) stages.load_moments(state[c], c);
            if constexpr (storage == StorageType::eight_bit) {
              state[c].first_scale = __shfl_sync(kAllLanes, first_scale[c], i);
              state[c].second_scale = __shfl_sync(kAllLanes, second_scale[c], i);
            }
            float g[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) g[j] = sum[c * 8 + j];
            const std::int64_t here = at + c * kBlockColumns;
            const bool moments =
                update8(epilogue.rule, state[c], g, constant_rate, p.first_element + static_cast<std::uint64_t>(here));
            if (live(c)) store_state(state[c], p, here, moments);
            if constexpr (kSquares)
              if (live(c)) weight_square += square_of(state[c]);
            if constexpr (storage == StorageType::eight_bit)
              if (lane == i) {
                first_scale[c] = state[c].first_scale;
                second_scale[c] = state[c].second_scale;
              }
          }
          if constexpr (kSquares) {
            if (a.stream.weight_square != nullptr) {
              weight_square = warp_sum(weight_square);
              if (lane == 0) a.stream.weight_square[unit_index * a.n_features + first + i] = weight_square;
            }
          }
        }
      }
      if constexpr (kStaged) {
        stages.release();
        if (i + kStages < count) stages.request(p, at + kStages * columns);
      }
      at += columns;
    }
    if (owns_scales) {
#pragma unroll
      for (int c = 0; c < kScales; ++c)
        if (kFull || unit.group * kChunks + c < segment_blocks) {
          p.first_scale[scale_at + c] = first_scale[c];
          p.second_scale[scale_at + c] = second_scale[c];
        }
    }
    wait_copies<0>();
    item = __shfl_sync(kAllLanes, next_item, 0);
  }
}

template <StorageType storage, int kChunks, bool kFull, int kRing, int kWarps, int kBlocks, StreamKind kKind,
          bool kUpdate, int kStages = 0, class Epilogue>
void launch_sized(cudaStream_t queue, const StreamArguments& arguments, const Epilogue& epilogue) {
  using Rows = RowStream<kChunks, kRing, kKind != StreamKind::encoder, kFull>;
  constexpr int kShared =
      kWarps * (kRing * Rows::kRowBytes + StateStages<kChunks, kStages>::kBytes + Rows::kDotBytes + kStages * 8);
  static_assert(kShared <= kDynamicSharedMemory);
  static_assert(kRing * kChunks * 512 >= kChunks * kBlockColumns * 4,
                "the sums of a hot feature fit into the memory of the rings");
  const auto kernel =
      stream_features<storage, kChunks, kFull, kRing, kWarps, kBlocks, kKind, kUpdate, kStages, Epilogue>;
  static const int resident = [&] {
    int blocks = 0;
    allow_shared_memory(reinterpret_cast<const void*>(kernel), kShared, "stream_features");
    require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kWarps * kWarp, kShared), "stream_features");
    return blocks;
  }();
  // Warps take items from a counter, so any number of blocks works. One block less leaves room for a barrier's warp.
  const int blocks = multiprocessors() * resident - (barriers_in_use() ? 1 : 0);
  kernel<<<blocks, kWarps * kWarp, kShared, queue>>>(arguments, epilogue);
  require_launch("stream_features");
}

/// Warps per block, limited by registers: 16 for the 8-bit state (12 with 1024 columns), 12 for bf16, 8 for fp32.
/// Timings: docs/performance.md.
template <StorageType storage, StreamKind kKind, bool kUpdate, class Epilogue>
void launch_grouped(cudaStream_t queue, const Grouping& grouping, const StreamArguments& arguments,
                    const Epilogue& epilogue) {
  constexpr bool kWide = storage == StorageType::fp32 && kUpdate;
  if (!grouping.full) {
    launch_sized<storage, 2, false, 8, 4, kWide ? 3 : 4, kKind, kUpdate>(queue, arguments, epilogue);
  } else if constexpr (storage == StorageType::eight_bit && kUpdate) {
    if (grouping.chunks == 2)
      launch_sized<storage, 2, true, 8, 4, 4, kKind, kUpdate, 2>(queue, arguments, epilogue);
    else if (grouping.chunks == 3)
      launch_sized<storage, 3, true, 4, 4, 4, kKind, kUpdate, 2>(queue, arguments, epilogue);
    else
      launch_sized<storage, 4, true, 4, 4, 3, kKind, kUpdate, 2>(queue, arguments, epilogue);
  } else {
    if (grouping.chunks == 2)
      launch_sized<storage, 2, true, 8, 4, kWide ? 3 : 4, kKind, kUpdate>(queue, arguments, epilogue);
    else if (grouping.chunks == 3)
      launch_sized<storage, 3, true, kWide ? 4 : 8, 4, kWide ? 2 : 3, kKind, kUpdate>(queue, arguments, epilogue);
    else
      launch_sized<storage, 4, true, 4, 4, kWide ? 2 : 3, kKind, kUpdate>(queue, arguments, epilogue);
  }
}

template <StreamKind kKind, bool kUpdate, class Epilogue>
void launch_stream(cudaStream_t queue, StorageType storage, const Grouping& grouping, const StreamArguments& arguments,
                   const Epilogue& epilogue) {
  if constexpr (!kUpdate) {  // reads only the bf16 plane of the weights, which all storage types have
    launch_grouped<StorageType::bf16, kKind, false>(queue, grouping, arguments, epilogue);
  } else {
    switch (storage) {
      case StorageType::fp32:
        return launch_grouped<StorageType::fp32, kKind, true>(queue, grouping, arguments, epilogue);
      case StorageType::bf16:
        return launch_grouped<StorageType::bf16, kKind, true>(queue, grouping, arguments, epilogue);
      case StorageType::eight_bit:
        return launch_grouped<StorageType::eight_bit, kKind, true>(queue, grouping, arguments, epilogue);
    }
  }
}

}  // namespace weft::kernels::cuda
