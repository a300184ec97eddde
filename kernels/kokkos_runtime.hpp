// SPDX-License-Identifier: Apache-2.0
//
// Initialisation and finalisation of the libraries that the kernels use. Only `device/` calls this.
#pragma once

#include <string>

#include "kernels/execution.hpp"

namespace weft::kernels {

/// Starts Kokkos (and the host BLAS) with `threads` host threads, on GPU `device` in a CUDA build. Once per process.
void start(int threads, int device);
void stop();

/// Most host threads that `start` can be given.
int most_threads();

/// Blocks until all work enqueued on `execution` has finished.
void fence(const Execution& execution);

/// Execution space of the portable kernels: "OpenMP", "Serial" or "Cuda".
std::string portable_space();
/// Versions of Kokkos and the dense library at run time, for run.json.
std::string library_versions();

}  // namespace weft::kernels
