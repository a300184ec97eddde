// SPDX-License-Identifier: Apache-2.0
//
// The GPU of this process, and what this program was compiled for. A GPU runs the code for the latest architecture that
// is not later than its own. Sources for Hopper alone are compiled for it whatever the rest is compiled for, so the
// functions below answer for the whole program, not for one source.
#pragma once

#include <string>

namespace weft::kernels::cuda {

/// Compute capabilities that the program was compiled for: "8.0, 9.0".
std::string compiled_architectures();

/// The earliest of them: 80 for 8.0.
int earliest_architecture();

/// True if the program has code that the current GPU can run.
bool has_code_for_gpu();

/// True if the GPU has clusters and early starts, and this program's code for it uses them.
bool has_clusters();

/// True on a GPU of compute capability 9.0, unless its code is that for an earlier one.
bool is_hopper();

}  // namespace weft::kernels::cuda
