// SPDX-License-Identifier: Apache-2.0
//
// Instructions of compute capability 9.0 alone (PTX ISA): products of a warpgroup whose operands are in shared memory
// (wgmma), copies of boxes of a matrix (cp.async.bulk.tensor), barriers in the shared memory of a cluster. For sources
// that are compiled for 90a only.
#pragma once

#include <cuda.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/gpu_architecture.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

/// Copies and operands swizzled over 128 bytes start at multiples of this in shared memory.
constexpr int kSwizzleAlignment = 1024;
constexpr int kSwizzledColumns = 64;  // columns of bf16: 128 bytes
constexpr int kWarpgroup = 128;       // threads
constexpr int kSumsOfThread = 128;    // per thread, of the 64 x 256 sums of a warpgroup

/// The driver's function, without a link to the driver (kernels/driver_on_demand.cpp).
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
            "cuTensorMapEncodeTiled");
#else
    require(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result),
            "cuTensorMapEncodeTiled");
#endif
    if (found == nullptr || result != cudaDriverEntryPointSuccess)
      throw Error(ExitCode::internal, "the GPU driver has no cuTensorMapEncodeTiled (it is older than CUDA 12.0)");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

/// Descriptor for cp.async.bulk.tensor: boxes of an array of bf16 whose first axis is contiguous, with kSwizzledColumns
/// elements of the first axis and `rows` of the last, swizzled over 128 bytes. Outside of the array there is 0.
/// `sizes`: of up to three axes; `strides`: of all but the first, in elements.
inline CUtensorMap boxes_of(const void* data, std::initializer_list<cuuint64_t> sizes,
                            std::initializer_list<cuuint64_t> strides, cuuint32_t rows) {
  const auto rank = static_cast<cuuint32_t>(sizes.size());
  cuuint32_t box[3] = {kSwizzledColumns, 1, 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  box[rank - 1] = rows;
  std::vector<cuuint64_t> bytes;
  for (const cuuint64_t stride : strides) bytes.push_back(stride * 2);
  CUtensorMap map;
  const CUresult status =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), sizes.begin(),
                           bytes.data(), box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw Error(ExitCode::internal, "products on the GPU: cuTensorMapEncodeTiled returned " + std::to_string(status));
  return map;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- products ------------------------------------------------------------------------------------------------------

/// An operand swizzled over 128 bytes; 1024 bytes from eight rows to the next eight. `panel`: bytes from 64 columns to
/// the next 64, where the contiguous axis is that of the result; unused where it is that of the sum.
__device__ __forceinline__ std::uint64_t operand_at(std::uint32_t address, int panel) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | static_cast<std::uint64_t>(panel >> 4) << 16 |
         static_cast<std::uint64_t>(1024 >> 4) << 32 | std::uint64_t{1} << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
/// The sums may be read and written from here on, or no longer.
template <int kSums>
__device__ __forceinline__ void fence_sums(float (&c)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// clang-format off
#define WEFT_SUMS_8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define WEFT_SUMS_32(c, i) WEFT_SUMS_8(c, i), WEFT_SUMS_8(c, i + 8), WEFT_SUMS_8(c, i + 16), WEFT_SUMS_8(c, i + 24)
// clang-format on

/// c = (adds ? c : 0) + a b with 16 terms: a has 64 rows, b 256 columns. `transposed`: the contiguous axis of both
/// operands is that of the result, else that of the sum.
/// c[i]: row lane / 4 + 8 (i / 2 % 2) of the 16 of a warp, column 2 (lane % 4) + 8 (i / 4) + i % 2.
template <bool transposed>
__device__ __forceinline__ void multiply(float (&c)[kSumsOfThread], std::uint64_t a, std::uint64_t b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},"
      " %128, %129, adds, 1, 1, %131, %131;\n}"
      : WEFT_SUMS_32(c, 0), WEFT_SUMS_32(c, 32), WEFT_SUMS_32(c, 64), WEFT_SUMS_32(c, 96)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(transposed ? 1 : 0)
      : "memory");
}
/// Multiplies like the function above, with 128 columns of b and 64 x 128 sums.
template <bool transposed>
__device__ __forceinline__ void multiply(float (&c)[kSumsOfThread / 2], std::uint64_t a, std::uint64_t b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
      " %64, %65, adds, 1, 1, %67, %67;\n}"
      : WEFT_SUMS_32(c, 0), WEFT_SUMS_32(c, 32)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(transposed ? 1 : 0)
      : "memory");
}
#undef WEFT_SUMS_32
#undef WEFT_SUMS_8

// ---- a cluster -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ int rank_in_cluster() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
/// Arrives at the barrier at this address in block `rank` of the cluster, for a reader of shared memory. Without
/// .release.cluster, which would wait for all of the thread's memory accesses (MEMBAR.ALL.GPU): nothing that was
/// written must be visible.
__device__ __forceinline__ void arrive_in_cluster(std::uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// ---- copies --------------------------------------------------------------------------------------------------------

/// Cache policy of the copies: the normal order of eviction from the L2 cache.
constexpr std::uint64_t kEvictNormal = 0x1000000000000000ull;

/// Box of a matrix described by `map` (CUtensorMap) to shared memory; elements beyond its ends are 0. One thread.
__device__ __forceinline__ void copy_box(std::uint32_t shared, const void* map, int x, int y, int z,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(kEvictNormal)
      : "memory");
}
/// Copies a box into every block of `blocks` (a bit each), at the same addresses, where the barriers count the bytes.
__device__ __forceinline__ void copy_box_to_all(std::uint32_t shared, const void* map, int x, int y,
                                                std::uint32_t barrier, std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks), "l"(kEvictNormal)
      : "memory");
}

// ---- warpgroups ----------------------------------------------------------------------------------------------------

/// Barriers 1 to 15 of a block, of `threads` threads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
/// Barrier like sync_threads; true if `value` is true in any of the threads.
__device__ __forceinline__ bool any_of_threads(int barrier, int threads, bool value) {
  int any;
  asm volatile(
      "{\n.reg .pred own, all;\nsetp.ne.b32 own, %1, 0;\nbar.red.or.pred all, %2, %3, own;\n"
      "selp.b32 %0, 1, 0, all;\n}"
      : "=r"(any)
      : "r"(static_cast<int>(value)), "r"(barrier), "r"(threads)
      : "memory");
  return any != 0;
}
/// Registers of each thread of this warpgroup from here on.
template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void return_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

#endif

}  // namespace weft::kernels::cuda
