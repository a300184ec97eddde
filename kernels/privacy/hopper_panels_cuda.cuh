// SPDX-License-Identifier: Apache-2.0
//
// What hopper_products_cuda.cu and hopper_gram_cuda.cu share. A block has two warpgroups of consumers and one thread of
// a further warp that requests operands from the copy engine.
//
//   panel           64 rows of 64 columns (128 bytes), swizzled over 128 bytes
//   stage           some panels of both operands, in a ring in shared memory
//   full[stage]     the copies of a stage have arrived
//   empty[stage]    every warp of consumers has read it: it may be overwritten
//
// The warpgroups do not wait for each other, so that one multiplies while the other scales or stores its sums. What
// they do per stage must be little: with a fence of the GPU (mbarrier.arrive.release.cluster) and more branches, norms
// ran at 455 TFLOP/s on an H200, with neither at 700.
#pragma once

#include "kernels/bulk_copy_cuda.cuh"
#include "kernels/hopper_cuda.cuh"
#include "kernels/privacy/hopper_products.hpp"

namespace weft::kernels::cuda {

inline constexpr int kHopperConsumers = kHopperWarps * kWarp, kHopperThreads = kHopperConsumers + kWarp;
inline constexpr int kPanelRows = static_cast<int>(kHopperRows), kPanelColumns = kSwizzledColumns;
inline constexpr int kPanelBytes = kPanelRows * kPanelColumns * 2;

/// Bytes of shared memory of a ring.
constexpr int ring_bytes(int stage_bytes, int stages) {
  return kSwizzleAlignment + stages * (stage_bytes + 2 * static_cast<int>(sizeof(std::uint64_t)));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

extern __shared__ unsigned char hopper_shared[];

/// Marks a value as equal in all lanes, for the compiler.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(kAllLanes, value, 0); }

/// The stages in turn, and the parity of the phase of their barriers.
template <int kBytes, int kCount>
struct Ring {
  static_assert(ring_bytes(kBytes, kCount) <= 227 * 1024);
  std::uint32_t base, stage = 0, phase = 0;

  /// Starts the barriers. All threads of the block call it.
  __device__ Ring() {
    const std::uint32_t start = static_cast<std::uint32_t>(__cvta_generic_to_shared(hopper_shared));
    base = (start + kSwizzleAlignment - 1) / kSwizzleAlignment * kSwizzleAlignment;
    if (threadIdx.x == 0) {
      for (; stage < kCount; ++stage) {
        start_barrier(full(), 1);
        start_barrier(empty(), kHopperWarps);
      }
      fence_barriers();
    }
    stage = 0;
    __syncthreads();
  }
  __device__ std::uint32_t data() const { return base + stage * kBytes; }
  __device__ std::uint32_t full() const { return base + kCount * kBytes + stage * 16; }
  __device__ std::uint32_t empty() const { return full() + 8; }
  __device__ void next() {
    if (++stage < kCount) return;
    stage = 0, phase ^= 1;
  }
};

/// Copies a panel; columns and rows outside of the matrix are 0. One thread.
__device__ __forceinline__ void copy_panel(std::uint32_t to, const CUtensorMap& from, std::int64_t column,
                                           std::int64_t row, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&from), "r"(static_cast<int>(column)), "r"(static_cast<int>(row)), "r"(barrier)
      : "memory");
}

/// A warp of consumers has read the stage of this barrier.
__device__ __forceinline__ void release(std::uint32_t empty) {
  if (threadIdx.x % kWarp == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty) : "memory");
}

/// Stores the sum over the values of a warp, its part of a tile.
__device__ __forceinline__ void store_part(double* parts, double value) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
}

#endif

/// Descriptor of the panels of a matrix, for copy_panel.
inline CUtensorMap panels_of(const TileMatrix& matrix, std::int64_t rows) {
  return boxes_of(matrix.data, {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(rows)},
                  {static_cast<cuuint64_t>(matrix.stride)}, kPanelRows);
}

/// Launches kernel<<<blocks>>>(arguments), with `shared` bytes of shared memory.
template <class Arguments>
void launch_hopper(const Execution& execution, void (*kernel)(Arguments), unsigned blocks, int shared,
                   const Arguments& arguments) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), shared, "products of examples", SharedMemoryOf::this_gpu);
  kernel<<<blocks, kHopperThreads, shared, stream_of(execution)>>>(arguments);
  require_launch("products of examples");
}

}  // namespace weft::kernels::cuda
