// SPDX-License-Identifier: Apache-2.0
//
// What the code of flash_tiles.hpp needs of a GPU: matrix instructions, copies to shared memory, shuffles within a
// warp.
#pragma once

#include <type_traits>

#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

extern __shared__ __align__(128) unsigned char shared_memory[];

#ifndef WEFT_BEFORE_AMPERE
/// Context of flash_tiles.hpp on a GPU.
template <class Number_>
struct DeviceContext {
  using Number = Number_;
  int thread;
  unsigned char* shared;
  std::uint32_t base;  ///< of `shared` in the shared address space

  __device__ __forceinline__ DeviceContext()
      : thread(static_cast<int>(threadIdx.x)),
        shared(shared_memory),
        base(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory))) {}

  __device__ __forceinline__ void sync() { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() { __syncwarp(); }
  __device__ __forceinline__ void copy16(std::uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(base + to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
  }
  __device__ __forceinline__ void copy4(std::uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(base + to), "l"(from), "r"(valid ? 4 : 0)
                 : "memory");
  }
  __device__ __forceinline__ void commit() { commit_copies(); }
  template <int pending>
  __device__ __forceinline__ void wait() {
    wait_copies<pending>();
  }
  __device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(base + address)
                 : "memory");
  }
  __device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(base + address)
                 : "memory");
  }
  __device__ __forceinline__ void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                           std::uint32_t b1) {
    if constexpr (std::is_same_v<Number, bf16>)
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  /// A matrix of 8 x 8, of which lane i has row i / 4 and columns i % 4 * 2 and the next, transposed.
  __device__ __forceinline__ std::uint32_t transposed(std::uint32_t pair) {
    std::uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
  }
  template <class T>
  __device__ __forceinline__ T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(kAllLanes, value, mask);
  }
  __device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};
#endif

}  // namespace weft::kernels::cuda
