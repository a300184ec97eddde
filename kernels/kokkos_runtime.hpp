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
/// The value of OPENBLAS_CORETYPE with which the dense library uses what this processor can do; "" if it does. OpenBLAS
/// has kernels for the processors that are older than itself, and takes those for SSE3 (its core Prescott) on a newer
/// one, which are several times slower.
std::string wanted_blas_core();

}  // namespace weft::kernels
