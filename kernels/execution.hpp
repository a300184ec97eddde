// SPDX-License-Identifier: Apache-2.0
//
// Where and in which order a kernel runs. First argument of every kernel; created by `device/`.
#pragma once

namespace weft::kernels {

/// portable: written once in Kokkos, runs in Kokkos' default execution space. cuda: hand-written, NVIDIA only.
/// dispatch.hpp selects between them.
enum class Backend { portable, cuda };

/// True if this build contains the hand-written CUDA kernels.
#ifdef WEFT_ENABLE_CUDA
constexpr bool kCudaBuild = true;
#else
constexpr bool kCudaBuild = false;
#endif

struct Execution {
  Backend backend = Backend::portable;
  void* stream = nullptr;  ///< cudaStream_t in a CUDA build; unused on the host
  /// Products of fp32 matrices round their operands to TF32 (10 bits of mantissa); sums stay fp32. GPU only.
  bool tf32 = false;
};

}  // namespace weft::kernels
