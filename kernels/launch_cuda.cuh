// SPDX-License-Identifier: Apache-2.0
//
// Launches of short kernels that follow one another, and of blocks that share sums (clusters), on GPUs of compute
// capability 9.0 and later.
//
// Launched by `launch_early`, a kernel may start while the kernel before it in the stream still runs, which hides its
// launch ("programmatic dependent launch", CUDA Programming Guide). It calls await_previous_kernel() in every thread
// before it reads or writes memory that other kernels write; a kernel then reads the results of all work before it, as
// without early start. An early kernel starts when all blocks of the one before have called allow_next_kernel() or have
// ended. Kernels after one that calls allow_next_kernel() only after its wait start when all kernels before that one
// have ended: the embedding does so for a step, and cached_attention.hpp relies on it.
#pragma once

#include <cooperative_groups.h>

#include <type_traits>

#include "kernels/gpu_architecture.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

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
/// Barrier of all threads of a cluster that does not order memory accesses: for blocks that must have started, or must
/// still exist. It does not wait until what was written is visible.
__device__ __forceinline__ void meet_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
#else
  __syncthreads();
#endif
}
/// Address of this variable in shared memory of block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T* in_cluster(T* shared, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(shared, static_cast<unsigned>(rank));
#else
  return shared;
#endif
}

struct LaunchOptions {
  /// A multiprocessor divides its memory into shared memory and first-level cache, and must be idle to divide it in
  /// another way. Kernels that follow one another therefore all request as much shared memory as there is.
  bool most_shared = true;
  /// The GPUs that have as much shared memory as the kernel requests.
  SharedMemoryOf shared = SharedMemoryOf::every_gpu;
};

/// kernel<<<grid, threads, shared>>>(arguments), which may start early. cluster: blocks of successive x that form a
/// cluster, a divisor of grid.x; 1 without has_clusters().
template <class Arguments>
void launch_early(const Execution& execution, const char* name, void (*kernel)(Arguments), dim3 grid, int threads,
                  std::int64_t shared, int cluster, const std::type_identity_t<Arguments>& arguments,
                  const LaunchOptions& options = {}) {
  if (options.most_shared && has_clusters())
    require(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        name);
  if (shared > 0) allow_shared_memory(reinterpret_cast<const void*>(kernel), shared, name, options.shared);
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
