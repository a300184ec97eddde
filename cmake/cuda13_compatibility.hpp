#pragma once
// SPDX-License-Identifier: Apache-2.0
//
// Kokkos before 4.7.01 calls three runtime functions with their CUDA 12 signatures, which CUDA 13 replaced.
// Force-included into CUDA sources, these overloads forward the old calls to the new forms.
#ifdef __CUDACC__
#include <cuda_runtime_api.h>
#if CUDART_VERSION >= 13000
inline cudaMemLocation weft_memory_location(int device) {
  cudaMemLocation location{};
  location.type = device < 0 ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
  location.id = device < 0 ? 0 : device;
  return location;
}
inline cudaError_t cudaMemPrefetchAsync(const void* pointer, size_t bytes, int device, cudaStream_t stream = nullptr) {
  return cudaMemPrefetchAsync(pointer, bytes, weft_memory_location(device), 0u, stream);
}
inline cudaError_t cudaMemAdvise(const void* pointer, size_t bytes, cudaMemoryAdvise advice, int device) {
  return cudaMemAdvise(pointer, bytes, advice, weft_memory_location(device));
}
inline cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t* from, const cudaGraphNode_t* to,
                                            size_t count) {
  return cudaGraphAddDependencies(graph, from, to, nullptr, count);
}
#endif
#endif
