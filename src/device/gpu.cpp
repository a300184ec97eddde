// SPDX-License-Identifier: Apache-2.0
#include "device/gpu.hpp"

#include <fmt/format.h>

namespace weft::device {
namespace {

constexpr int kLeastCapability = 75;  // scripts/setup.sh, cmake/WeftCudaArchitecture.cmake
const char* const kHostProgram =
    "a program built without CUDA (cmake --preset cpu-release && cmake --build build/cpu-release), which this one "
    "starts by itself as weft-cpu in its folder or as build/cpu-release/weft";

int capability_of(const Gpu& gpu) { return 10 * gpu.major + gpu.minor; }

std::string text_of(const GpuBuild& build) {
  return build.kokkos == 0
             ? build.architectures
             : fmt::format("{} (Kokkos for {}.{})", build.architectures, build.kokkos / 10, build.kokkos % 10);
}

}  // namespace

std::string gpu_problem(const Gpu& gpu, const GpuBuild& build) {
  if (gpu.count == 0) return fmt::format("no GPU is visible ({})", gpu.why_none);
  if (gpu.has_code && build.kokkos <= capability_of(gpu)) return {};
  return fmt::format("GPU {} ({}) has compute capability {}.{}, this program was built for {}", gpu.index, gpu.name,
                     gpu.major, gpu.minor, text_of(build));
}

std::string gpu_obstacle(const Gpu& gpu, const GpuBuild& build, const std::string& backend) {
  const std::string problem = gpu_problem(gpu, build);
  if (problem.empty()) return {};
  if (gpu.count == 0)
    return fmt::format(
        "device.backend = \"{}\": {}; this program was built with CUDA for compute capability {}, and its portable "
        "kernels run on the GPU as well: start it on a node with a GPU, or take {}",
        backend, problem, text_of(build), kHostProgram);
  if (capability_of(gpu) < kLeastCapability)
    return fmt::format("{} (GPUs before 7.5 are not supported); take {}", problem, kHostProgram);
  return fmt::format(
      "{}; build both for this GPU: WEFT_CUDA_ARCH={} bash scripts/setup.sh --cuda && cmake --preset cuda-release "
      "-DWEFT_CUDA_ARCH={} && cmake --build build/cuda-release; or take {}",
      problem, capability_of(gpu), capability_of(gpu), kHostProgram);
}

}  // namespace weft::device
