// SPDX-License-Identifier: Apache-2.0
//
// Prefix sums of counts: over a block of threads, and over an array by one block.
#pragma once

#include <cub/block/block_scan.cuh>

#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

constexpr int kScanThreads = 1024;

/// Sum over a block of kScanThreads; value[i] of each thread becomes the sum of all values before it.
template <class Count, int kCount>
__device__ __forceinline__ Count block_scan(Count (&value)[kCount]) {
  using Scan = cub::BlockScan<Count, kScanThreads>;
  __shared__ typename Scan::TempStorage memory;
  Count total;
  Scan(memory).ExclusiveSum(value, value, total);
  __syncthreads();
  return total;
}

/// data[i] becomes the sum of data[0 .. i). Launched with one block of kScanThreads.
template <class Count>
__global__ void __launch_bounds__(kScanThreads) scan_in_one_block(Count* data, std::int64_t n) {
  constexpr int kScanned = 8;  // adjacent elements of a thread
  Count carry = 0;
  for (std::int64_t turn = 0; turn < n; turn += kScanThreads * kScanned) {
    const std::int64_t first = turn + static_cast<std::int64_t>(threadIdx.x) * kScanned;
    Count value[kScanned];
#pragma unroll
    for (int i = 0; i < kScanned; ++i) value[i] = first + i < n ? data[first + i] : 0;
    const Count total = block_scan(value);
#pragma unroll
    for (int i = 0; i < kScanned; ++i)
      if (first + i < n) data[first + i] = carry + value[i];
    carry += total;
  }
}

}  // namespace weft::kernels::cuda
