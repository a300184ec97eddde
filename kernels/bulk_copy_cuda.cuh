// SPDX-License-Identifier: Apache-2.0
//
// Copies from global to shared memory whose end a barrier in shared memory (8 bytes) signals: by the copy engine of a
// multiprocessor from compute capability 9.0 on (cp.async.bulk), else by the lanes of a warp.
#pragma once

#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

__device__ __forceinline__ uint2 load_shared8(std::uint32_t address) {
  uint2 word;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(word.x), "=r"(word.y) : "r"(address));
  return word;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kBulkCopies = true;
#else
constexpr bool kBulkCopies = false;
#endif

/// A phase of the barrier ends after `arrivals` and the bytes that were expected.
__device__ __forceinline__ void start_barrier(std::uint32_t barrier, int arrivals) {
#ifndef WEFT_BEFORE_AMPERE
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}
/// Barriers that this thread has started are visible to all copies and threads.
__device__ __forceinline__ void fence_barriers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/// Copies to shared memory that start later do not pass what the block has written there; all threads call it.
__device__ __forceinline__ void fence_shared_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncthreads();
}
/// Arrives once, for a phase that also takes this many bytes.
__device__ __forceinline__ void expect_bytes(std::uint32_t barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
/// One thread copies; addresses and size are multiples of 16. The lines leave the L2 cache first, as with __ldcs.
__device__ __forceinline__ void copy_bulk(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
#endif
}
/// Arrives when all copies that this thread has started (copy16_async) are complete.
__device__ __forceinline__ void arrive_after_copies(std::uint32_t barrier) {
#ifndef WEFT_BEFORE_AMPERE
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}
/// Waits for the end of the phase of this parity; phases count from 0.
__device__ __forceinline__ void wait_barrier(std::uint32_t barrier, std::uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
#elif !defined(WEFT_BEFORE_AMPERE)
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
#else
  __syncwarp();  // the copies were stores
#endif
}

}  // namespace weft::kernels::cuda
