// SPDX-License-Identifier: Apache-2.0
//
// How a kernel is to run. Passed by value to every kernel; `device/` makes it.
#pragma once

namespace weft::kernels {

/// portable: written once in Kokkos, runs in Kokkos' default execution space. cuda: hand-written, NVIDIA only.
enum class Backend { portable, cuda };

struct Execution {
  Backend backend = Backend::portable;
  void* stream = nullptr;  ///< cudaStream_t in a CUDA build; unused on the host
};

}  // namespace weft::kernels
