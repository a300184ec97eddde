// SPDX-License-Identifier: Apache-2.0
#include "device/gpu.hpp"

#include <fmt/format.h>

namespace weft::device {
namespace {

constexpr int kLeastCapability = 75;  // scripts/setup.sh, cmake/WeftCudaArchitecture.cmake
const char* const kHostProgram =
    "a program built without CUDA (cmake --preset cpu-release && cmake --build build/cpu-release)";

}  // namespace

std::string gpu_obstacle(const Gpu& gpu, const GpuBuild& build, const std::string& backend) {
  const std::string built = build.kokkos == 0 ? build.architectures
                                              : fmt::format("{} (Kokkos for {}.{})", build.architectures,
                                                            build.kokkos / 10, build.kokkos % 10);
  if (gpu.count == 0)
    return fmt::format(
        "device.backend = \"{}\": no GPU is visible ({}); this program was built with CUDA for compute capability {}, "
        "and its portable kernels run on the GPU as well: start it on a node with a GPU, or take {}",
        backend, gpu.why_none, built, kHostProgram);
  const int capability = 10 * gpu.major + gpu.minor;
  if (gpu.has_code && build.kokkos <= capability) return {};
  const std::string found = fmt::format("GPU {} ({}) has compute capability {}.{}, this program was built for {}",
                                        gpu.index, gpu.name, gpu.major, gpu.minor, built);
  if (capability < kLeastCapability)
    return fmt::format("{} (GPUs before 7.5 are not supported); take {}", found, kHostProgram);
  return fmt::format(
      "{}; build both for this GPU: WEFT_CUDA_ARCH={} bash scripts/setup.sh --cuda && cmake --preset cuda-release "
      "-DWEFT_CUDA_ARCH={} && cmake --build build/cuda-release; or take {}",
      found, capability, capability, kHostProgram);
}

}  // namespace weft::device
