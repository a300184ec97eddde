// SPDX-License-Identifier: Apache-2.0
//
// Two reasons to replace the process by another one, before MPI starts, which cannot be started again. A CUDA build has
// no GPU to compute on: all its kernels are compiled for the GPU, the portable ones too, so the program that was built
// without CUDA replaces it. And OpenBLAS, which reads its environment when it is loaded, does not know the processor.
#pragma once

#include <filesystem>
#include <string>

namespace weft::device {

/// The program without CUDA that replaces the CUDA build at `program`: weft-cpu in its folder (an installation), or
/// cpu-release/weft next to its build folder. "" if there is neither, or no `problem` with the GPUs.
std::filesystem::path host_program(const std::string& problem, const std::filesystem::path& program);

/// Replaces a CUDA build that no visible GPU can run by its `host_program`. Returns where it need not, or cannot:
/// Runtime then ends with the error. `argv`: of this process, ends with a null pointer.
void hand_over_without_gpu(char** argv);

/// Starts this program again with OPENBLAS_CORETYPE if OpenBLAS does not know the processor
/// (kernels::wanted_blas_core) and the variable is not set. Returns where it need not, or cannot. `argv`: as above.
void restart_with_blas_core(char** argv);

/// Why this program replaces a CUDA build: the problem with the GPUs. "" if it replaces none.
std::string replaces_cuda_because();

/// Message of a program without CUDA for device.backend = "cuda".
std::string cuda_unavailable();

}  // namespace weft::device
