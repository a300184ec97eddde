// SPDX-License-Identifier: Apache-2.0
//
// Shared by the hand-written CUDA kernels: launches, packed bf16, sums over a warp in a fixed order, asynchronous
// copies to shared memory. Only kernels/*_cuda.cu include this.
//
// GPUs. The kernels run from compute capability 8.0 on. Instructions of later GPUs have an equivalent that gives the
// same bits (decode2 of adam_cuda.cuh); those of 8.0 have one here, so that the program also compiles for 7.5, where
// the portable kernels run (device/runtime.cpp). No kernel needs more shared memory than all GPUs from 8.0 on have
// (shared_memory.hpp); some take more where there is more.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "base/error.hpp"
#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"
#include "kernels/shared_memory.hpp"

namespace weft::kernels::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define WEFT_BEFORE_AMPERE
#endif

inline cudaStream_t stream_of(const Execution& execution) { return static_cast<cudaStream_t>(execution.stream); }

/// Throws Error(internal) on failure. After a launch: reports a kernel that could not start here, not at the next
/// synchronisation.
inline void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(ExitCode::internal, std::string(what) + ": " + cudaGetErrorString(status));
}
inline void require_launch(const char* what) { require(cudaGetLastError(), what); }

/// Number of multiprocessors of the current device, queried once (one process drives one GPU). Launches that fill the
/// GPU derive their size from it.
inline int multiprocessors() {
  static const int count = [] {
    int device = 0, value = 0;
    require(cudaGetDevice(&device), "cudaGetDevice");
    require(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return value;
  }();
  return count;
}

/// Number of blocks for `count` items, `per_block` each, at most `most` (kernels stride over the rest).
inline unsigned blocks_for(std::int64_t count, std::int64_t per_block,
                           std::int64_t most = (std::int64_t{1} << 31) - 1) {
  const std::int64_t blocks = (count + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

__device__ __forceinline__ float low_bf16(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

/// Eight bf16 of a 16-byte word as fp32.
__device__ __forceinline__ void unpack8(const uint4& word, float (&value)[8]) {
  const std::uint32_t pair[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[2 * i] = low_bf16(pair[i]);
    value[2 * i + 1] = high_bf16(pair[i]);
  }
}

/// Rounded to nearest even, the low half first.
__device__ __forceinline__ std::uint32_t pack2(float low, float high) {
#ifdef WEFT_BEFORE_AMPERE
  return to_bf16(low).bits | static_cast<std::uint32_t>(to_bf16(high).bits) << 16;
#else
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
__device__ __forceinline__ uint4 pack8(const float (&value)[8]) {
  return make_uint4(pack2(value[0], value[1]), pack2(value[2], value[3]), pack2(value[4], value[5]),
                    pack2(value[6], value[7]));
}

/// Two values rounded to fp16, `low` in the lower half.
__device__ __forceinline__ std::uint32_t pack2_half(float low, float high) {
#ifdef WEFT_BEFORE_AMPERE
  return to_half(low).bits | static_cast<std::uint32_t>(to_half(high).bits) << 16;
#else
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
__device__ __forceinline__ uint4 pack8_half(const float (&value)[8]) {
  return make_uint4(pack2_half(value[0], value[1]), pack2_half(value[2], value[3]), pack2_half(value[4], value[5]),
                    pack2_half(value[6], value[7]));
}
__device__ __forceinline__ void unpack8_half(const uint4& word, float (&value)[8]) {
  const std::uint32_t pair[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[2 * i] = half{static_cast<std::uint16_t>(pair[i] & 0xffffu)};
    value[2 * i + 1] = half{static_cast<std::uint16_t>(pair[i] >> 16)};
  }
}

/// Eight numbers of a 16-bit type, as a matrix of this type stores them.
__device__ __forceinline__ uint4 pack8(Scalar type, const float (&value)[8]) {
  return type == Scalar::bf16 ? pack8(value) : pack8_half(value);
}
__device__ __forceinline__ void unpack8(Scalar type, const uint4& word, float (&value)[8]) {
  if (type == Scalar::bf16)
    unpack8(word, value);
  else
    unpack8_half(word, value);
}

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

/// Sum and largest over the lanes, on every lane.
__device__ __forceinline__ std::uint32_t warp_total(std::uint32_t value) {
#ifdef WEFT_BEFORE_AMPERE
  return warp_sum(value);
#else
  return __reduce_add_sync(kAllLanes, value);
#endif
}
__device__ __forceinline__ std::uint32_t warp_largest(std::uint32_t value) {
#ifdef WEFT_BEFORE_AMPERE
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
#else
  return __reduce_max_sync(kAllLanes, value);
#endif
}

/// Sum over the lanes below this one.
__device__ __forceinline__ std::uint32_t warp_exclusive_sum(std::uint32_t value, int lane) {
  std::uint32_t sum = value;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const std::uint32_t below = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += below;
  }
  return sum - value;
}

__device__ __forceinline__ void store_shared16(std::uint32_t address, const uint4& word) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(word.x), "r"(word.y), "r"(word.z),
               "r"(word.w)
               : "memory");
}
__device__ __forceinline__ void copy16_async(std::uint32_t shared, const void* global) {
#ifdef WEFT_BEFORE_AMPERE
  store_shared16(shared, __ldg(static_cast<const uint4*>(global)));
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#endif
}
/// Copies 16 bytes, or zeros, that are read once per kernel: the second-level cache evicts them first.
__device__ __forceinline__ void copy16_once(std::uint32_t shared, const void* global, bool valid) {
#ifdef WEFT_BEFORE_AMPERE
  store_shared16(shared, valid ? __ldg(static_cast<const uint4*>(global)) : make_uint4(0, 0, 0, 0));
#else
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() {
#ifndef WEFT_BEFORE_AMPERE
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int pending>
__device__ __forceinline__ void wait_copies() {
#ifndef WEFT_BEFORE_AMPERE
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}
__device__ __forceinline__ uint4 load_shared16(std::uint32_t address) {
  uint4 word;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "r"(address));
  return word;
}

/// One element of a matrix as fp32.
__device__ __forceinline__ float load_element(const void* data, Scalar type, std::int64_t at) {
  if (type == Scalar::fp32) return static_cast<const float*>(data)[at];
  if (type == Scalar::bf16) return static_cast<const bf16*>(data)[at];
  return static_cast<const half*>(data)[at];
}
__device__ __forceinline__ void store_element(void* data, Scalar type, std::int64_t at, float value) {
  if (type == Scalar::fp32)
    static_cast<float*>(data)[at] = value;
  else if (type == Scalar::bf16)
    static_cast<bf16*>(data)[at] = to_bf16(value);
  else
    static_cast<half*>(data)[at] = to_half(value);
}

inline bool is_aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

}  // namespace weft::kernels::cuda
