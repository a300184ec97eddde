// SPDX-License-Identifier: Apache-2.0
//
// Rings in the shared memory of a warp of the stream (feature_stream_cuda.cuh): the rows of hits, and the 8-bit state
// of the next features.
#pragma once

#include "kernels/bulk_copy_cuda.cuh"
#include "kernels/optimize/adam_cuda.cuh"
#include "kernels/transcoder/sparse/hit_stream_cuda.cuh"

namespace weft::kernels::cuda {

/// Four lanes sum the 32 partial dots of a hit, so that a warp sums those of eight hits at once. With the stride of 36
/// neither the stores nor the loads have bank conflicts.
constexpr int kDotHits = 8;
constexpr int kDotStride = 36;

/// The rows of a list of hits, through a ring of kRing rows; sums them into dW and, with kDots, dots them with the
/// weights. Without dots the rows of hits whose value is 0 are not read: they add nothing (listed entries of jumprelu
/// that are not active).
template <int kChunks, int kRing, bool kDots, bool kFull>
struct RowStream {
  static_assert((kRing & (kRing - 1)) == 0);
  static constexpr int kRowBytes = kChunks * 512;
  static constexpr int kDotBytes = kDots ? kDotHits * kDotStride * 4 : 0;

  std::uint32_t ring;  // address of this lane's part
  float* dots;         // [kDotHits][kDotStride]: partial dots by lane
  const char* rows;    // first row, this lane's first column
  std::int64_t row_bytes;
  const Hit* hits;
  float* out;          // receives the dots of these hits
  std::uint32_t live;  // bit c: chunk c of this lane is inside the row
  int total, lane, next;
  float value_sum;  // without dots: sum of the values since the caller set it to 0
  Hit now, later;   // groups of 32 hits, one per lane: the group of `next` and the following one

  __device__ __forceinline__ Hit window(int at) const {
    Hit hit{0, 0.0f};
    if (at + lane < total) {
      const uint2 word = __ldg(reinterpret_cast<const uint2*>(hits + at + lane));
      hit = {word.x, __uint_as_float(word.y)};
    }
    return hit;
  }
  __device__ __forceinline__ void request(std::uint32_t token, float value, int at) {
    if (at < total && (kDots || value != 0.0f)) {
      const char* from = rows + token * row_bytes;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        if (kFull || (live >> c & 1)) copy16_async(ring + (at & (kRing - 1)) * kRowBytes + c * 512, from + c * 512);
    }
    commit_copies();
  }
  /// Sums the dots of hits [first, next].
  __device__ __forceinline__ void sum_dots_to(int first) {
    __syncwarp();
    const float* own = dots + (lane >> 2) * kDotStride + (lane & 3);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarp; i += 4) sum += own[i];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const int hit = first + (lane >> 2);
    if ((lane & 3) == 0 && hit <= next) __stcs(out + hit, sum);
    __syncwarp();
  }
  __device__ __forceinline__ void start() {
    next = 0;
    now = window(0);
    later = window(kWarp);
#pragma unroll
    for (int i = 0; i < kRing; ++i)
      request(__shfl_sync(kAllLanes, now.token, i), kDots ? 0.0f : __shfl_sync(kAllLanes, now.value, i), i);
  }
  /// Processes hits [next, end).
  __device__ __forceinline__ void run(int end, const float (&weight)[kChunks * 8], float (&sum)[kChunks * 8]) {
    for (; next < end; ++next) {
      const float a = __shfl_sync(kAllLanes, now.value, next & 31);
      if constexpr (!kDots) value_sum += a;
      const int ahead = next + kRing;
      const bool in_later = ((ahead ^ next) >> 5) != 0;
      const std::uint32_t token = __shfl_sync(kAllLanes, in_later ? later.token : now.token, ahead & 31);
      const float value = kDots ? 0.0f : __shfl_sync(kAllLanes, in_later ? later.value : now.value, ahead & 31);
      wait_copies<kRing - 1>();
      float dot0 = 0.0f, dot1 = 0.0f;
      if (kDots || a != 0.0f) {  // uniform over the warp
        uint4 word[kChunks];
#pragma unroll
        for (int c = 0; c < kChunks; ++c) word[c] = load_shared16(ring + (next & (kRing - 1)) * kRowBytes + c * 512);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          float g[8];
          unpack8(word[c], g);
#pragma unroll
          for (int i = 0; i < 8; i += 2) {
            sum[c * 8 + i] = fmaf(a, g[i], sum[c * 8 + i]);
            sum[c * 8 + i + 1] = fmaf(a, g[i + 1], sum[c * 8 + i + 1]);
            if constexpr (kDots) {
              dot0 = fmaf(g[i], weight[c * 8 + i], dot0);
              dot1 = fmaf(g[i + 1], weight[c * 8 + i + 1], dot1);
            }
          }
        }
      }
      request(token, value, ahead);
      if constexpr (kDots) {
        dots[(next & (kDotHits - 1)) * kDotStride + lane] = dot0 + dot1;
        if ((next & (kDotHits - 1)) == kDotHits - 1 || next + 1 == total) sum_dots_to(next & ~(kDotHits - 1));
      }
      if ((next & 31) == 31) {
        now = later;
        later = window((next & ~31) + 2 * kWarp);
      }
    }
  }
};

/// The 8-bit state of the next features of an item, through a private ring of stages in shared memory, each the weights
/// and both moments of `kChunks * 256` columns of a row. kStages = 0: none.
template <int kChunks, int kStages>
struct StateStages {
  static constexpr int kWeights = kChunks * kBlockColumns * 2, kMoments = kChunks * kBlockColumns;
  static constexpr int kStageBytes = kWeights + 2 * kMoments;
  static constexpr int kBytes = kStages * kStageBytes;

  std::uint32_t memory, barriers;
  std::uint32_t requested, used;  // numbers of features since the start of the kernel
  int lane;

  __device__ __forceinline__ void start(char* stages, char* at, int own_lane) {
    memory = static_cast<std::uint32_t>(__cvta_generic_to_shared(stages));
    barriers = static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
    requested = used = 0;
    lane = own_lane;
    if (lane == 0)
      for (int i = 0; i < kStages; ++i) start_barrier(barriers + 8 * i, kBulkCopies ? 1 : kWarp);
    fence_barriers();
    __syncwarp();
  }
  /// Requests the state of the next feature; `at`: this lane's first column.
  __device__ __forceinline__ void request(const StatePointers& p, std::int64_t at) {
    const std::uint32_t slot = requested % kStages, to = memory + slot * kStageBytes, barrier = barriers + 8 * slot;
    ++requested;
    if constexpr (kBulkCopies) {
      if (lane == 0) {
        expect_bytes(barrier, kStageBytes);
        copy_bulk(to, p.weight + at, kWeights, barrier);
        copy_bulk(to + kWeights, static_cast<const char*>(p.first) + at, kMoments, barrier);
        copy_bulk(to + kWeights + kMoments, static_cast<const char*>(p.second) + at, kMoments, barrier);
      }
    } else {
      const std::int64_t first = at - lane * kLaneColumns;
      const auto copy = [&](std::uint32_t shared, const void* global, int bytes) {
        for (int i = lane * 16; i < bytes; i += kWarp * 16)
          copy16_async(shared + i, static_cast<const char*>(global) + i);
      };
      copy(to, p.weight + first, kWeights);
      copy(to + kWeights, static_cast<const char*>(p.first) + first, kMoments);
      copy(to + kWeights + kMoments, static_cast<const char*>(p.second) + first, kMoments);
      arrive_after_copies(barrier);
    }
  }
  __device__ __forceinline__ std::uint32_t slot() const { return memory + used % kStages * kStageBytes; }
  __device__ __forceinline__ void wait() const { wait_barrier(barriers + 8 * (used % kStages), used / kStages & 1); }
  __device__ __forceinline__ uint4 weight(int c) const { return load_shared16(slot() + c * 512 + lane * 16); }
  __device__ __forceinline__ void load_moments(LaneState<StorageType::eight_bit>& state, int c) const {
    const std::uint32_t at = slot() + kWeights + c * kBlockColumns + lane * kLaneColumns;
    state.first = load_shared8(at);
    state.second = load_shared8(at + kMoments);
  }
  /// Allows the stage that was waited for to be overwritten.
  __device__ __forceinline__ void release() {
    ++used;
    __syncwarp();
  }
};

}  // namespace weft::kernels::cuda
