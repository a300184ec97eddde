// SPDX-License-Identifier: Apache-2.0
//
// Start and stop of the libraries behind the kernels. Only `device/` calls this.
#pragma once

#include <string>

#include "kernels/execution.hpp"

namespace weft::kernels {

/// Starts Kokkos (and the host BLAS) with `threads` host threads, on GPU `device` in a CUDA build. Once per process.
void start(int threads, int device);
void stop();

/// Waits until everything given to `execution` has finished.
void fence(const Execution& execution);

/// "OpenMP", "Serial" or "Cuda": where the portable kernels run.
std::string portable_space();
/// Versions of Kokkos and the dense library at run time, for the record of a run.
std::string library_versions();

}  // namespace weft::kernels
