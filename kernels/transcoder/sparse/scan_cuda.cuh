// SPDX-License-Identifier: Apache-2.0
//
// Prefix sums of counts, for the sparse lists: over a block of threads, and over an array by one block.
#pragma once

#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

constexpr int kScanThreads = 1024;

/// Sum of the block over `value`; `before` gets the sum of the threads before this one.
static __device__ __forceinline__ std::int64_t block_scan(std::int64_t value, std::int64_t& before) {
  __shared__ std::int64_t warp_total[kWarp];
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  std::int64_t sum = value;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const std::int64_t below = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += below;
  }
  if (lane == kWarp - 1) warp_total[warp] = sum;
  __syncthreads();
  const int n_warps = static_cast<int>(blockDim.x / kWarp);
  std::int64_t base = 0, total = 0;
  for (int i = 0; i < n_warps; ++i) {
    if (i == warp) base = total;
    total += warp_total[i];
  }
  __syncthreads();
  before = base + sum - value;
  return total;
}

/// data[i] becomes the sum of data[0 .. i). Launched with one block of kScanThreads.
static __global__ void __launch_bounds__(kScanThreads) scan_in_one_block(std::int64_t* data, std::int64_t n) {
  std::int64_t carry = 0;
  for (std::int64_t first = 0; first < n; first += kScanThreads) {
    const std::int64_t i = first + threadIdx.x;
    std::int64_t before = 0;
    const std::int64_t total = block_scan(i < n ? data[i] : 0, before);
    if (i < n) data[i] = carry + before;
    carry += total;
  }
}

}  // namespace weft::kernels::cuda
