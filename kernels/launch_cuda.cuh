// SPDX-License-Identifier: Apache-2.0
//
// Launches of short kernels that follow one another, and of blocks that exchange sums (clusters), on GPUs of compute
// capability 9.0 and later.
//
// Launched by `launch_early`, a kernel may start while the kernel before it in the stream still runs, which hides its
// launch ("programmatic dependent launch", CUDA Programming Guide). It calls await_previous_kernel() in every thread
// before it reads or writes memory that other kernels write; a kernel then sees all that was done before it, as without
// early start. An early kernel starts when all blocks of the one before have called allow_next_kernel() or have ended.
// Kernels after one that calls allow_next_kernel() only after its wait start when all kernels before that one have
// ended: the embedding does so for a step, and cached_attention.hpp relies on it.
#pragma once

#include <cooperative_groups.h>

#include <initializer_list>

#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

/// True if the GPU has clusters and early starts, and this program's code for it uses them: the GPU runs the code for
/// the latest architecture that is not later than its own.
inline bool has_clusters() {
  static const bool has = [] {
    int device = 0, major = 0, minor = 0;
    require(cudaGetDevice(&device), "cudaGetDevice");
    require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    require(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    for (const int architecture : {__CUDA_ARCH_LIST__})
      if (architecture >= 900 && architecture <= 100 * major + 10 * minor) return true;
    return false;
  }();
  return has;
}

__device__ __forceinline__ void await_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Barrier of all threads of a cluster; of the block, where there are no clusters.
__device__ __forceinline__ void sync_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().sync();
#else
  __syncthreads();
#endif
}
/// The same barrier without an order of memory accesses: for blocks that must have started, or must still exist. It
/// does not wait until what was written is visible.
__device__ __forceinline__ void meet_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
#else
  __syncthreads();
#endif
}
/// The same variable in shared memory of block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T* in_cluster(T* shared, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(shared, static_cast<unsigned>(rank));
#else
  return shared;
#endif
}

/// kernel<<<grid, threads, shared>>>(arguments), which may start early. cluster: blocks of successive x that form a
/// cluster, a divisor of grid.x; 1 without has_clusters().
///
/// most_shared: a multiprocessor divides its memory into shared memory and first-level cache, and must be idle to
/// divide it in another way. Kernels that follow one another therefore all ask for as much shared memory as there is.
template <class Arguments>
void launch_early(const Execution& execution, const char* name, void (*kernel)(Arguments), dim3 grid, int threads,
                  std::int64_t shared, int cluster, const std::type_identity_t<Arguments>& arguments,
                  bool most_shared = true) {
  if (most_shared && has_clusters())
    require(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        name);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared);
  config.stream = stream_of(execution);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = !has_clusters() ? 0 : cluster > 1 ? 2 : 1;
  require(cudaLaunchKernelEx(&config, kernel, arguments), name);
}

}  // namespace weft::kernels::cuda
