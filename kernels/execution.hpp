// SPDX-License-Identifier: Apache-2.0
//
// How a kernel is to run. Passed by value to every kernel; `device/` makes it.
#pragma once

namespace weft::kernels {

/// portable: written once in Kokkos, runs in Kokkos' default execution space. cuda: hand-written, NVIDIA only.
enum class Backend { portable, cuda };

/// Whether this build has the hand-written kernels. A function that has one begins with
///   if constexpr (kCudaBuild)
///     if (execution.backend == Backend::cuda) return cuda::f(...);
#ifdef WEFT_ENABLE_CUDA
constexpr bool kCudaBuild = true;
#else
constexpr bool kCudaBuild = false;
#endif

struct Execution {
  Backend backend = Backend::portable;
  void* stream = nullptr;  ///< cudaStream_t in a CUDA build; unused on the host
};

}  // namespace weft::kernels
