// SPDX-License-Identifier: Apache-2.0
//
// Products on Hopper's warpgroup matrix instructions, persistent: a cluster of two blocks forms tiles of 2 x 128 tokens
// x 256 features, one after the other, of all layers of a launch.
//
//   2 warpgroups   consumers: 64 x 256 sums each in registers, then their filter
//   1 thread       requests the operands from the copy engine (cp.async.bulk.tensor); each block copies one half of W's
//                  tile to both
//   2 warps        writers, one per consumer: biases, the exact comparison, places in the list
//
//   full[stage]    the operands of kInner terms have arrived  empty[stage]  all consumers of the cluster have read them
//   limits[slot]   the limits of a tile have arrived          filled, written  a consumer's hits are complete, read
//
// The filter of a tile. A consumer compares each sum with its feature's limit (one instruction). A thread puts product
// and position of the few above it into a list of its own in shared memory: no order, no atomics, no waiting. The
// writer adds biases, compares with the threshold or the bound, and marks the entries in a bitmap, from which follow
// the counts of each token and the place of each entry; it reserves a range of the list with one atomic addition, and
// writes. Meanwhile the consumer forms the next tile. If a thread finds more than its list holds (a threshold that was
// far too low), the warpgroup passes on four rows at a time.
//
// The second consumer runs kLead stages behind the first one, so that one multiplies while the other one compares.
//
// Limit: the tensor cores' rate at the board's power limit. Measured: docs/performance.md.
#include <algorithm>

#include "kernels/bulk_copy_cuda.cuh"
#include "kernels/hopper_cuda.cuh"
#include "kernels/transcoder/select/hopper_filter.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kTokens = kConsumers * 64;  // tokens of a block's tile
constexpr int kFeatures = static_cast<int>(kHopperFeatures);
constexpr int kInner = kSwizzledColumns;  // terms of the inner product per stage
constexpr int kStages = 4;
constexpr int kCluster = 2;
constexpr int kLead = 2;    // stages that the first warpgroup is ahead of the second
constexpr int kGroup = 16;  // pairs of tiles along the tokens that are formed before the next features
constexpr int kBytesX = kTokens * kInner * 2, kBytesW = kFeatures * kInner * 2;
// Registers of a thread: at launch, and after the producers have returned some to the consumers. A scheduler has 3 of
// the block's warps and a quarter of the multiprocessor's 65,536 registers. The rest suffices for one warp of a barrier
// between ranks (kernels/peers/), which otherwise could not start before the last tile is done.
constexpr int kRegisters = 160, kConsumerRegisters = 208, kProducerRegisters = 64;
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * kRegisters);
static_assert(((kConsumers + 1) * kRegisters + 32) * kWarp <= 65536 / 4);
constexpr int kMostFound = 24;  // hits of a thread in a tile
constexpr int kMostOfRow = 64;  // hits of a thread in a row: all its columns
constexpr int kMaps = 32;       // layers of a launch
constexpr int kAllRows = -1;

using Count = unsigned long long;

struct Arguments {
  CUtensorMap x;               // (d, layers, tokens)
  CUtensorMap weight[kMaps];   // (d, features) of each layer of the launch
  const float* bias[kMaps];    // filter
  const float* bounds[kMaps];  // filter by bounds
  HopperFilter filter;
  const float* limit;  // [layers, padded_features] of the filter; store: the biases of the layer, if parts are wanted
  std::int64_t padded_features;
  std::uint16_t* product;  // store: [tokens, product_stride]
  std::int64_t product_stride;
  float* largest;                         // store: PartsOfRows
  int all_layers, first_layer, n_layers;  // layers of the model; first and number of layers of the launch
  int tokens, features;
  int steps;  // stages of a tile
};

/// Hits of a warpgroup in its part of a tile, 64 rows x 256 features.
struct alignas(16) Hits {
  std::uint32_t bits[64][kFeatures / 32];        // entries of the list; used by write_hits only
  std::uint32_t found[kWarpgroup * kMostFound];  // above their limit: product (bf16) << 16 | row << 8 | column
  std::uint8_t count[kWarpgroup];                // hits of each thread, from `begin_of` on
  int row;   // rows of the batch: kAllRows, or those whose index in their 16 is this
  int last;  // batch of the tile

  /// Four threads of a warp share a row.
  static __device__ __forceinline__ int begin_of(int thread, int row) {
    return row == kAllRows ? thread * kMostFound : (thread / kWarp * 4 + thread % 4) * kMostOfRow;
  }
};

struct Shared {
  unsigned char x[kStages][kBytesX];
  unsigned char weight[kStages][kBytesW];
  float limit[2][kFeatures];
  Hits hits[kConsumers];
  std::uint64_t full[kStages], empty[kStages], limits[2], filled[kConsumers], written[kConsumers];
};
constexpr int kSharedBytes = static_cast<int>(sizeof(Shared)) + kSwizzleAlignment;
static_assert(kSharedBytes <= 227 * 1024);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ std::uint32_t address_of(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

/// Arrives at a barrier after this thread's reads and writes. Every thread arrives, so that racecheck can follow the
/// order.
__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t address, std::uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

struct Tile {
  int layer, token, feature;  // layer of the launch; first token of the block, first feature
};

/// Order of the tiles over the clusters: layer by layer; in a layer by groups of tokens, and in a group all its tokens
/// before the next features.
struct Tiles {
  int features, pairs, of_layer, count;

  __device__ explicit Tiles(const Arguments& a)
      : features((a.features + kFeatures - 1) / kFeatures),
        pairs((a.tokens + kCluster * kTokens - 1) / (kCluster * kTokens)),
        of_layer(features * pairs),
        count(of_layer * a.n_layers) {}
  __device__ Tile at(const Arguments& a, int index, int rank) const {
    const int layer = index / of_layer, in_layer = index % of_layer;
    const int first = in_layer / (kGroup * features) * kGroup, in_group = in_layer - first * features;
    const int width = min(kGroup, pairs - first);
    return {layer, ((first + in_group % width) * kCluster + rank) * kTokens, in_group / width * kFeatures};
  }
};

/// Copies the operands of all tiles to the stages. Called by one thread.
template <bool stores>
__device__ __forceinline__ void produce(const Arguments& a, Shared& s, int rank) {
  constexpr int kPart = kFeatures / kCluster;  // rows of W that this block copies for the cluster
  const Tiles tiles(a);
  int step = 0, number = 0;
  for (int index = blockIdx.x / kCluster; index < tiles.count; index += gridDim.x / kCluster, ++number) {
    const Tile tile = tiles.at(a, index, rank);
    for (int k = 0; k < a.steps; ++k, ++step) {
      const int stage = step % kStages;
      wait_barrier(address_of(&s.empty[stage]), (step / kStages & 1) ^ 1);
      const std::uint32_t full = address_of(&s.full[stage]);
      expect_bytes(full, kBytesX + kBytesW);
      copy_box(address_of(s.x[stage]), &a.x, k * kInner, a.first_layer + tile.layer, tile.token, full);
      copy_box_to_all(address_of(s.weight[stage]) + rank * (kBytesW / kCluster), &a.weight[tile.layer], k * kInner,
                      tile.feature + rank * kPart, full, (1 << kCluster) - 1);
      if ((!stores || a.largest != nullptr) && k == 0) {
        // Both warpgroups have finished the tile before the last one if they have released a stage of the last one.
        const int slot = number & 1;
        const std::uint32_t limits = address_of(&s.limits[slot]);
        expect_bytes(limits, kFeatures * 4);
        copy_bulk(address_of(s.limit[slot]), a.limit + (a.first_layer + tile.layer) * a.padded_features + tile.feature,
                  kFeatures * 4, limits);
      }
    }
  }
}

/// Adds biases to the hits of a warpgroup and appends the entries that exceed threshold or bound to the list. Called by
/// one warp.
__device__ __forceinline__ void write_hits(const Arguments& a, Shared& s, int rank, int warpgroup, int lane) {
  const Tiles tiles(a);
  const HopperFilter& f = a.filter;
  Hits& hits = s.hits[warpgroup];
  int batch = 0;
  for (int index = blockIdx.x / kCluster; index < tiles.count; index += gridDim.x / kCluster) {
    Tile tile = tiles.at(a, index, rank);
    tile.token += warpgroup * 64;
    const int layer = a.first_layer + tile.layer, g = f.all_layers ? 0 : layer;
    const float* const bias = a.bias[tile.layer] + tile.feature;
    const float* const bounds = f.bounds != nullptr ? a.bounds[tile.layer] + tile.feature : nullptr;
    const float threshold = f.threshold != nullptr ? __uint_as_float(__ldg(f.threshold + g)) : 0.0f;
    for (bool last = false; !last; ++batch) {
      wait_barrier(address_of(&s.filled[warpgroup]), batch & 1);
      last = hits.last != 0;
      const int only = hits.row;
      // Each lane handles four threads of the warpgroup.
      const std::uint32_t counts = reinterpret_cast<const std::uint32_t*>(hits.count)[lane];
      const auto count_of = [](std::uint32_t four, int i) { return static_cast<int>(four >> 8 * i & 255); };
      const int own = count_of(counts, 0) + count_of(counts, 1) + count_of(counts, 2) + count_of(counts, 3);
      const int begin = static_cast<int>(warp_exclusive_sum(static_cast<std::uint32_t>(own), lane));
      const int found = __shfl_sync(kAllLanes, begin + own, kWarp - 1);
      // The whole warp calls visit(row, column, r, passes) for 32 hits at a time.
      const auto for_each = [&](auto&& visit) {
        for (int first = 0; first < found; first += kWarp) {
          const int i = first + lane;
          int of = 0;  // the last lane that begins at or before i
#pragma unroll
          for (int step = kWarp / 2; step > 0; step /= 2)
            if (__shfl_sync(kAllLanes, begin, of + step) <= i) of += step;
          int left = i - __shfl_sync(kAllLanes, begin, of), thread = 4 * of;
          const std::uint32_t four = __shfl_sync(kAllLanes, counts, of);
          bool later = true;
#pragma unroll
          for (int j = 0; j < 3; ++j) {
            later = later && left >= count_of(four, j);
            if (later) left -= count_of(four, j), ++thread;
          }
          const std::uint32_t one = i < found ? hits.found[Hits::begin_of(thread, only) + left] : 0;
          const int column = static_cast<int>(one & 255);
          const float r = high_bf16(one) + __ldg(bias + column);
          visit(static_cast<int>(one >> 8 & 63), column, r,
                i < found && r > (bounds != nullptr ? __ldg(bounds + column) : threshold));
        }
      };
      for_each([&](int row, int column, float, bool passes) {
        if (passes) atomicOr(&hits.bits[row][column / 32], 1u << column % 32);
      });
      __syncwarp();
      int of_row[2];  // 2 lane, 2 lane + 1
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        of_row[j] = 0;
#pragma unroll
        for (int w = 0; w < kFeatures / 32; ++w) of_row[j] += __popc(hits.bits[2 * lane + j][w]);
      }
      const int before = static_cast<int>(warp_exclusive_sum(static_cast<std::uint32_t>(of_row[0] + of_row[1]), lane));
      const int n = __shfl_sync(kAllLanes, before + of_row[0] + of_row[1], kWarp - 1);
      Count start = 0;
      if (lane == 0 && n > 0) start = atomicAdd(f.cursor + g * f.cursor_stride, static_cast<Count>(n));
      start = __shfl_sync(kAllLanes, start, 0);
      const bool fits = start + static_cast<Count>(n) <= static_cast<Count>(f.capacity);
      const std::uint32_t base = static_cast<std::uint32_t>(g * f.capacity + static_cast<std::int64_t>(start));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = 2 * lane + j;
        if (tile.token + row < a.tokens && (only == kAllRows || row % 16 == only))
          f.segment[(static_cast<std::int64_t>(tile.token + row) * a.all_layers + layer) * tiles.features +
                    tile.feature / kFeatures] =
              make_uint2(base + static_cast<std::uint32_t>(before + (j == 0 ? 0 : of_row[0])),
                         fits ? static_cast<std::uint32_t>(of_row[j]) : 0u);
      }
      if (n > 0 && fits)
        for_each([&](int row, int column, float r, bool passes) {
          int at = __shfl_sync(kAllLanes, before, row / 2);
          const int of_even = __shfl_sync(kAllLanes, of_row[0], row / 2);
          if (row % 2 != 0) at += of_even;
#pragma unroll
          for (int w = 0; w < kFeatures / 32; ++w) {
            const std::uint32_t bits = hits.bits[row][w];
            at += __popc(w < column / 32 ? bits : w == column / 32 ? bits & ((1u << column % 32) - 1) : 0);
          }
          if (!passes) return;
          const std::uint32_t place = base + static_cast<std::uint32_t>(at);
          f.key[place] = static_cast<std::uint32_t>(layer * a.features + tile.feature + column);
          f.value[place] = r;
        });
      __syncwarp();
      if (n > 0)
        for (int i = lane; i < static_cast<int>(sizeof hits.bits) / 16; i += kWarp)
          reinterpret_cast<uint4*>(hits.bits)[i] = make_uint4(0, 0, 0, 0);
      __syncwarp();
      arrive(address_of(&s.written[warpgroup]));
    }
  }
}

/// Passes the sums that exceed their limits to write_hits. Called by a warpgroup.
__device__ __forceinline__ void filter_sums(const Arguments& a, Shared& s, const Tile& tile, int slot, int warpgroup,
                                            int& batch, const float (&c)[kSumsOfThread]) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarp;
  Hits& hits = s.hits[warpgroup];
  const float* const limit = s.limit[slot] + lane % 4 * 2;
  const int row = thread / kWarp * 16 + lane / 4;
  const std::uint32_t position = static_cast<std::uint32_t>(row << 8 | lane % 4 * 2);
  for (int only = kAllRows;;) {
    wait_barrier(address_of(&s.written[warpgroup]), (batch & 1) ^ 1);
    bool takes[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      takes[h] = tile.token + warpgroup * 64 + row + 8 * h < a.tokens && (only == kAllRows || lane / 4 + 8 * h == only);
    const std::uint32_t begin = address_of(hits.found + Hits::begin_of(thread, only));
    const std::uint32_t last_eight = begin + ((only == kAllRows ? kMostFound : kMostOfRow) - 8) * 4;
    std::uint32_t at = begin;
    bool full = false;
#pragma unroll
    for (int first = 0; first < kSumsOfThread / 4; first += 4) {
      float2 bound[4];
      bool any[2] = {false, false};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bound[i] = *reinterpret_cast<const float2*>(limit + (first + i) * 8);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          any[h] = any[h] || c[(first + i) * 4 + 2 * h] > bound[i].x;
          any[h] = any[h] || c[(first + i) * 4 + 2 * h + 1] > bound[i].y;
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (any[h] && takes[h]) {
          full = full || at > last_eight;
          if (full) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const float product = c[(first + i) * 4 + 2 * h + j];
              if (product > (j == 0 ? bound[i].x : bound[i].y)) {
                store_shared(at, pack2(0.0f, product) | position | (h << 11 | (first + i) << 3 | j));
                at += 4;
              }
            }
        }
    }
    hits.count[thread] = static_cast<std::uint8_t>((at - begin) / 4);
    __syncwarp();
    if (any_of_threads(2 + warpgroup, kWarpgroup, full)) {  // four rows at a time instead
      only = 0;
      continue;
    }
    const bool last = only == kAllRows || only == 15;
    if (thread == 0) {
      hits.row = only;
      hits.last = last;
    }
    __syncwarp();
    arrive(address_of(&s.filled[warpgroup]));
    ++batch;
    if (last) return;
    ++only;
  }
}

/// Stores the products, and the largest sums with the biases of the tile's features. Called by a warpgroup. Each warp
/// collects 16 rows of a part in shared memory, so that it writes whole lines.
__device__ __forceinline__ void store_sums(const Arguments& a, Shared& s, int slot, const Tile& tile, int warpgroup,
                                           const float (&c)[kSumsOfThread]) {
  constexpr int kPart = static_cast<int>(kHopperPart), kParts = kFeatures / kPart;
  constexpr int kRowBytes = kPart * 2 + 16;  // padding avoids bank conflicts
  static_assert(kParts == 4);                // number of threads of a warp that share a row: each writes one
  static_assert(kWarpgroup / kWarp * 16 * kRowBytes <= sizeof s.hits[0].found);
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, warp = thread / kWarp, lane = thread % kWarp;
  const int own = lane % 4, first_row = tile.token + warpgroup * 64 + warp * 16;
  unsigned char* const rows = reinterpret_cast<unsigned char*>(s.hits[warpgroup].found) + warp * 16 * kRowBytes;
  const float* const biases = s.limit[slot] + own * 2;
  float largest[2] = {0.0f, 0.0f};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    float most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int eight = 0; eight < kPart / 8; ++eight) {
      const int i = (part * (kPart / 8) + eight) * 4;
      const std::uint32_t word[2] = {pack2(c[i], c[i + 1]), pack2(c[i + 2], c[i + 3])};
      float2 bias{};
      if (a.largest != nullptr) bias = *reinterpret_cast<const float2*>(biases + part * kPart + eight * 8);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<std::uint32_t*>(rows + (lane / 4 + 8 * h) * kRowBytes + eight * 16 + own * 4) = word[h];
        if (a.largest != nullptr)
          most[h] = fmaxf(most[h], fmaxf(low_bf16(word[h]) + bias.x, high_bf16(word[h]) + bias.y));
      }
    }
    __syncwarp();
    const int column = tile.feature + part * kPart + lane % 8 * 8;
#pragma unroll
    for (int four = 0; four < 16; four += 4) {
      const int row = four + lane / 8;
      const uint4 eight = *reinterpret_cast<const uint4*>(rows + row * kRowBytes + lane % 8 * 16);
      if (first_row + row < a.tokens && column < a.features)
        *reinterpret_cast<uint4*>(a.product + (first_row + row) * a.product_stride + column) = eight;
    }
    __syncwarp();
    if (a.largest == nullptr) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      most[h] = fmaxf(most[h], __shfl_xor_sync(kAllLanes, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(kAllLanes, most[h], 2));
      if (own == part) largest[h] = most[h];
    }
  }
  if (a.largest == nullptr || tile.feature + own * kPart >= a.features) return;
  const std::int64_t parts = (a.features + kPart - 1) / kPart;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + lane / 4 + 8 * h;
    if (row < a.tokens) a.largest[row * parts + tile.feature / kPart + own] = largest[h];
  }
}

template <bool stores>
__device__ __forceinline__ void consume(const Arguments& a, Shared& s, int rank, int warpgroup) {
  const Tiles tiles(a);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto release = [&](int step) {
    if (lane < kCluster) arrive_in_cluster(address_of(&s.empty[step % kStages]), lane);
  };
  float c[kSumsOfThread];
  int step = 0, number = 0, batch = 0;
  for (int index = blockIdx.x / kCluster; index < tiles.count; index += gridDim.x / kCluster, ++number) {
    // The second warpgroup runs behind the first one, so that one computes while the other one filters.
    if (kLead > 0 && warpgroup == 1) sync_threads(1, kConsumers * kWarpgroup);
    Tile tile{};
    for (int k = 0; k < a.steps; ++k, ++step) {
      const int stage = step % kStages;
      wait_barrier(address_of(&s.full[stage]), step / kStages & 1);
      const std::uint64_t x = operand_at(address_of(s.x[stage]) + warpgroup * (kBytesX / kConsumers), 16),
                          w = operand_at(address_of(s.weight[stage]), 16);
      fence_sums(c);
      begin_products();
#pragma unroll
      for (int i = 0; i < kInner / 16; ++i)
        multiply<false>(c, x + i * (16 * 2 >> 4), w + i * (16 * 2 >> 4), k > 0 || i > 0);
      commit_products();
      if (kLead > 0 && warpgroup == 0 && k == kLead) arrive_threads(1, kConsumers * kWarpgroup);
      if (k == 0) {  // while the products are formed
        tile = tiles.at(a, index, rank);
      } else {
        wait_products<1>();
        release(step - 1);
      }
    }
    wait_products<0>();
    fence_sums(c);
    release(step - 1);
    if (!stores || a.largest != nullptr) wait_barrier(address_of(&s.limits[number & 1]), number >> 1 & 1);
    if constexpr (stores)
      store_sums(a, s, number & 1, tile, warpgroup, c);
    else
      filter_sums(a, s, tile, number & 1, warpgroup, batch, c);
  }
}

extern __shared__ unsigned char filter_shared[];

#endif

template <bool stores>
__global__ void __maxnreg__(kRegisters) multiply_and_filter(const __grid_constant__ Arguments a) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __trap();
#else
  const std::uint32_t begin = address_of(filter_shared);
  Shared& s = *reinterpret_cast<Shared*>(
      filter_shared + ((begin + kSwizzleAlignment - 1) / kSwizzleAlignment * kSwizzleAlignment - begin));
  const int thread = static_cast<int>(threadIdx.x), rank = kCluster > 1 ? rank_in_cluster() : 0;
  for (int i = thread; i < static_cast<int>(sizeof s.hits) / 4; i += kThreads)
    reinterpret_cast<std::uint32_t*>(s.hits)[i] = 0;
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      start_barrier(address_of(&s.full[i]), 1);
      start_barrier(address_of(&s.empty[i]), kCluster * kConsumers * kWarpgroup / kWarp);
    }
    for (int i = 0; i < 2; ++i) {
      start_barrier(address_of(&s.limits[i]), 1);
      start_barrier(address_of(&s.filled[i]), kWarpgroup);
      start_barrier(address_of(&s.written[i]), kWarp);
    }
    fence_barriers();
  }
  __syncthreads();
  if constexpr (kCluster > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  const int warpgroup = thread / kWarpgroup, warp = thread % kWarpgroup / kWarp, lane = thread % kWarp;
  if (warpgroup == kConsumers) {
    return_registers<kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) produce<stores>(a, s, rank);
    } else if (!stores && warp <= kConsumers) {
      write_hits(a, s, rank, warp - 1, lane);
    }
  } else {
    take_registers<kConsumerRegisters>();
    consume<stores>(a, s, rank, warpgroup);
  }
  // The other block may still arrive at this one's barriers.
  __syncwarp();
  if constexpr (kCluster > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

bool takes(const AnyMatrix& matrix) {
  return matrix.type == Scalar::bf16 && matrix.stride % 8 == 0 && is_aligned(matrix.data, 16);
}

/// Builds the arguments of a launch; x has the columns of `layers` layers.
Arguments arguments_of(const AnyMatrix& x, std::int64_t layers, const AnyMatrix& weight) {
  const std::int64_t d = weight.columns;
  Arguments a{};
  a.x = boxes_of(x.data, {cuuint64_t(d), cuuint64_t(layers), cuuint64_t(x.rows)}, {cuuint64_t(d), cuuint64_t(x.stride)},
                 kTokens);
  a.all_layers = static_cast<int>(layers);
  a.tokens = static_cast<int>(x.rows);
  a.features = static_cast<int>(weight.rows);
  a.steps = static_cast<int>((d + kInner - 1) / kInner);
  return a;
}

template <bool stores>
void launch(const Execution& execution, const Arguments& a) {
  const auto kernel = multiply_and_filter<stores>;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream_of(execution);
  config.attrs = &cluster;
  config.numAttrs = 1;
  static const int clusters = [&] {
    int most = 0;
    allow_shared_memory(reinterpret_cast<const void*>(kernel), kSharedBytes, "products with a filter",
                        SharedMemoryOf::this_gpu);
    require(cudaOccupancyMaxActiveClusters(&most, kernel, &config), "products with a filter: occupancy");
    return most;
  }();
  config.gridDim = dim3(static_cast<unsigned>(clusters) * kCluster);
  require(cudaLaunchKernelEx(&config, kernel, a), "products with a filter");
}

}  // namespace

bool takes_hopper_filter(const EncoderOperands& operands) {
  if (!is_hopper() || operands.weight.empty() || operands.x.rows == 0 || !takes(operands.x)) return false;
  const std::int64_t d = operands.weight[0].columns, n_features = operands.weight[0].rows;
  const std::int64_t tiles =
      ((operands.x.rows + kTokens - 1) / kTokens + 1) * ((n_features + kFeatures - 1) / kFeatures) * kMaps;
  bool all = d % 8 == 0 && (d + kInner - 1) / kInner >= kStages && n_features > 0 && tiles < std::int64_t{1} << 31;
  for (const AnyMatrix& weight : operands.weight) all = all && takes(weight);
  return all;
}

void filter_hopper_products(const Execution& execution, const EncoderOperands& operands, std::int64_t layer_begin,
                            std::int64_t layer_end, const HopperFilter& filter) {
  Arguments a = arguments_of(operands.x, static_cast<std::int64_t>(operands.weight.size()), operands.weight[0]);
  a.filter = filter;
  a.limit = filter.limit;
  a.padded_features = filter.padded_features;
  for (std::int64_t first = layer_begin; first < layer_end; first += kMaps) {
    a.first_layer = static_cast<int>(first);
    a.n_layers = static_cast<int>(std::min<std::int64_t>(kMaps, layer_end - first));
    for (int i = 0; i < a.n_layers; ++i) {
      const AnyMatrix& weight = operands.weight[static_cast<std::size_t>(first + i)];
      a.weight[i] = boxes_of(weight.data, {cuuint64_t(weight.columns), cuuint64_t(weight.rows)},
                             {cuuint64_t(weight.stride)}, kFeatures / kCluster);
      a.bias[i] = filter.bias[first + i];
      if (filter.bounds != nullptr) a.bounds[i] = filter.bounds[first + i];
    }
    launch<false>(execution, a);
  }
}

void store_hopper_products(const Execution& execution, AnyMatrix x, AnyMatrix weight, AnyMatrix product,
                           const PartsOfRows& parts) {
  Arguments a = arguments_of(x, 1, weight);
  a.n_layers = 1;
  a.weight[0] = boxes_of(weight.data, {cuuint64_t(weight.columns), cuuint64_t(weight.rows)},
                         {cuuint64_t(weight.stride)}, kFeatures / kCluster);
  a.product = static_cast<std::uint16_t*>(product.data);
  a.product_stride = product.stride;
  a.limit = parts.bias;
  a.largest = parts.largest;
  launch<true>(execution, a);
}

}  // namespace weft::kernels::cuda
