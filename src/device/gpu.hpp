// SPDX-License-Identifier: Apache-2.0
//
// The GPU that a process finds, compared with those for which the program was built.
#pragma once

#include <string>

namespace weft::device {

/// What the CUDA runtime says of the GPU that this process selects.
struct Gpu {
  int count = 0;         ///< visible GPUs
  std::string why_none;  ///< if there are none
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  bool has_code = false;     ///< the program has code that it can run
};

/// What a CUDA build was compiled for.
struct GpuBuild {
  std::string architectures;  ///< for which Weft was compiled, "8.0, 9.0"
  int kokkos = 0;             ///< architecture of Kokkos, 90 for 9.0; 0: not known
};

/// Why this build cannot compute with this GPU; "" if it can.
std::string gpu_problem(const Gpu&, const GpuBuild&);

/// Problem, reason and remedy if this build cannot compute with this GPU, or has none; "" if it can.
std::string gpu_obstacle(const Gpu&, const GpuBuild&, const std::string& backend);

/// Why this program can compute with none of the visible GPUs; "" if it can with one, and in a build without CUDA.
/// Creates no context on a GPU. A program with machine code for an earlier architecture alone passes here; Runtime then
/// ends with the error.
std::string problem_of_gpus();

/// Least compute capability of the hand-written kernels, major; earlier GPUs have the portable ones.
constexpr int kLeastMajor = 8;

}  // namespace weft::device
