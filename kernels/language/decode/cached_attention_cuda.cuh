// SPDX-License-Identifier: Apache-2.0
//
// Attention against a cache on a GPU (cached_attention_cuda.cu): how it is divided.
//
// Limit: memory with many rows: the keys and values of a sequence are read once, or as often as a key head has groups
// of query heads: 2 * positions * kv_heads * head_size elements per row. With few rows the latency of the instructions
// between the end of the kernel before and the last store.
//
// A part is some positions of a key head, which one warp copies to shared memory, some parts ahead, and alone reads:
// warps do not communicate until all keys are read. The parts of a sequence are divided into strands. A warp
// sums one strand after another, each with its own softmax, relative to its largest score; then the sums of all strands
// are joined. So a block may have few warps, with many rows, or many, with few rows; then a cluster of blocks may also
// share a sequence and a group of heads. How a sequence is divided into strands depends on its position alone, and so
// do all bits of the result.
//
// Keys and values of earlier positions are read before the kernel before this one has ended. The new ones are read
// where they came from, and stored for later steps.
#pragma once

#include <algorithm>
#include <cfloat>

#include "kernels/language/decode/cached_attention.hpp"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels::cuda {

constexpr int kCachedLeastWarps = 2, kCachedMostWarps = 8;    ///< of a block
constexpr int kCachedLeastStages = 2, kCachedMostStages = 4;  ///< parts of a warp in shared memory
constexpr int kCachedMostBlocks = 4;                          ///< of a cluster
constexpr float kLog2OfE = 1.44269504f;  ///< scores are in units of ln 2: their exponentials are powers of 2

struct CachedArguments {
  CachedAttention shape;
  AnyMatrix queries, keys, values, cached_keys, cached_values, out;
  int groups;  ///< of query heads that share a key head
  int blocks;  ///< that share a sequence and a group: 1, 2 or 4
  int stages;
};

constexpr int kSeveralStrands = 16, kMostStrands = 32;  ///< most of a sequence; of a long one

/// Number of strands of a sequence of `parts` parts: a power of two. Part p belongs to strand p % strands; each has at
/// least one.
WEFT_HOST_DEVICE inline int strands_of(int parts) {
  constexpr int kLongParts = 64;
  if (parts > kLongParts) return kMostStrands;
  int strands = 1;
  while (strands < kSeveralStrands && 2 * strands < parts) strands *= 2;
  return strands;
}

/// The work of a block: up to kHeads query heads that share a key head, of one sequence, some of its strands.
template <int kPart, int kHeads>
struct CachedWork {
  int row, rank, thread, threads, warps, lane, warp;
  int size, key_head, first_head, heads;
  bool first_group;  ///< of the key head: it stores the new key and value
  CachedSequence sequence;
  int position, lower, origin;  ///< lower: the first key; origin: where parts begin
  int parts, strands, blocks, first_strand, strand_step;

  __device__ __forceinline__ explicit CachedWork(const CachedArguments& a)
      : row(static_cast<int>(blockIdx.z)),
        rank(static_cast<int>(blockIdx.x)),
        thread(static_cast<int>(threadIdx.x)),
        threads(static_cast<int>(blockDim.x)),
        warps(threads / kWarp),
        lane(thread % kWarp),
        warp(thread / kWarp),
        size(static_cast<int>(a.shape.head_size)),
        key_head(static_cast<int>(blockIdx.y) / a.groups),
        sequence(a.shape.sequences[row]),
        position(__ldcg(a.shape.positions.data + row)) {
    const int group = static_cast<int>(a.shape.heads / a.shape.kv_heads),
              of_group = static_cast<int>(blockIdx.y) % a.groups * kHeads;
    const std::int64_t window = a.shape.window;
    first_head = key_head * group + of_group;
    heads = min(kHeads, group - of_group);
    first_group = of_group == 0;
    lower = window > 0 && position >= window ? static_cast<int>(position - window + 1) : 0;
    origin = lower / kPart * kPart;
    parts = position / kPart - lower / kPart + 1;
    strands = strands_of(parts);
    blocks = max(1, min(a.blocks, strands / warps));
    first_strand = rank * warps + warp;
    strand_step = blocks * warps;
  }
  __device__ __forceinline__ bool runs() const { return position < sequence.end; }
};

/// Successive parts of a warp: strand by strand.
struct PartOfWarp {
  int strand, part;

  __device__ __forceinline__ explicit PartOfWarp(int first) : strand(first), part(first) {}
  __device__ __forceinline__ void advance(int parts, int strands, int strand_step) {
    part += strands;
    if (part >= parts) part = strand += strand_step;
  }
};

/// Waits until the oldest of `stages` groups of copies has arrived.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  switch (stages) {
    case 2:
      return wait_copies<1>();
    case 3:
      return wait_copies<2>();
    default:
      return wait_copies<kCachedMostStages - 1>();
  }
}

/// The sums of all strands of a block's heads, in shared memory: relative to the largest score, and that score and the
/// sum of exponentials.
template <int kColumns>
struct StrandSums {
  float* value;     ///< [strands][heads][kColumns]
  float2* softmax;  ///< [strands][heads]

  static constexpr std::int64_t bytes(std::int64_t strands, std::int64_t heads) {
    return strands * heads * (kColumns * 4 + 8);
  }
  __device__ __forceinline__ StrandSums(unsigned char* memory, int strands, int heads)
      : value(reinterpret_cast<float*>(memory)),
        softmax(reinterpret_cast<float2*>(memory + strands * heads * kColumns * 4)) {}

  /// Sums of the first block of a cluster.
  __device__ __forceinline__ StrandSums of_cluster(int blocks) const {
    StrandSums first = *this;
    if (blocks > 1) {
      first.value = in_cluster(value, 0);
      first.softmax = in_cluster(softmax, 0);
    }
    return first;
  }
  /// Finishes after the last strand: the first block calls store(head, column, value) with the result. A warp takes 32
  /// columns of a head; its lane i has the factor of strand i.
  template <class Work, class Store>
  __device__ __forceinline__ void join(const Work& w, const Store& store) const {
    if (w.blocks > 1)
      sync_cluster();
    else
      __syncthreads();
    if (w.rank != 0) return;
    const int groups = (w.size + kWarp - 1) / kWarp;
    for (int i = w.warp; i < w.heads * groups; i += w.warps) {
      const int h = i / groups, c = i % groups * kWarp + w.lane;
      const float2 own = w.lane < w.strands ? softmax[w.lane * w.heads + h] : make_float2(-FLT_MAX, 0.0f);
      float largest = own.x;
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, offset));
      float factor = exp2f(own.x - largest);
      factor = __fdividef(factor, warp_sum(own.y * factor));
      float sum = 0.0f;
#pragma unroll 4
      for (int strand = 0; strand < w.strands; ++strand) {
        const float of_strand = __shfl_sync(kAllLanes, factor, strand);
        if (c < w.size) sum += value[(strand * w.heads + h) * kColumns + c] * of_strand;
      }
      if (c < w.size) store(h, c, sum);
    }
  }
};

inline std::int64_t device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  require(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

/// Launches the kernel of a Tile: kPart, kHeads, kStageBytes, and Sums. The fewer blocks there are, the more warps each
/// must have to hide latencies; there are as many parts in shared memory as leave all blocks on the GPU.
template <class Tile>
void launch_cached(const Execution& execution, CachedArguments arguments, void (*kernel)(CachedArguments)) {
  constexpr std::int64_t kReserved = 1024;  // bytes that the driver takes of each block's shared memory
  constexpr std::int64_t kMostShared =
      104 * 1024;                             // dynamic; leaves room for a block of the product before this kernel
  constexpr int kWarpsOfMultiprocessor = 24;  // aimed at
  static const std::int64_t of_multiprocessor = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                            of_block = std::min(most_dynamic_shared_memory(reinterpret_cast<const void*>(kernel)),
                                                kMostShared);
  const CachedAttention& shape = arguments.shape;
  const std::int64_t group = shape.heads / shape.kv_heads, of_group = std::min<std::int64_t>(group, Tile::kHeads);
  arguments.groups = static_cast<int>((group + Tile::kHeads - 1) / Tile::kHeads);
  const std::int64_t heads = shape.kv_heads * arguments.groups, rows = shape.sequences.size;
  arguments.blocks = 1;
  while (has_clusters() && arguments.blocks < kCachedMostBlocks &&
         2 * arguments.blocks * heads * rows <= multiprocessors())
    arguments.blocks *= 2;
  const std::int64_t each = blocks_for(arguments.blocks * heads * rows, multiprocessors()),
                     parts = (shape.longest - 1) / Tile::kPart + 1,
                     sums = Tile::Sums::bytes(strands_of(static_cast<int>(std::min<std::int64_t>(parts, 1 << 30))),
                                              of_group);
  int warps = std::min(kCachedMostWarps, kSeveralStrands / arguments.blocks);
  arguments.stages = kCachedMostStages;
  const auto bytes = [&] { return warps * arguments.stages * Tile::kStageBytes + sums; };
  while (warps > kCachedLeastWarps && warps * each > kWarpsOfMultiprocessor) warps /= 2;
  while (arguments.stages > kCachedLeastStages &&
         (bytes() > of_block || (bytes() + kReserved) * each > of_multiprocessor))
    --arguments.stages;
  while (warps > 1 && bytes() > of_block) warps /= 2;
  launch_early<CachedArguments>(
      execution, "cached_attention", kernel,
      dim3(static_cast<unsigned>(arguments.blocks), static_cast<unsigned>(heads), static_cast<unsigned>(rows)),
      warps * kWarp, bytes(), arguments.blocks, arguments, {.shared = SharedMemoryOf::this_gpu});
}

}  // namespace weft::kernels::cuda
