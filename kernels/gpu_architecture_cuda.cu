// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>

#include "kernels/gpu_architecture.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};  // 900 for 9.0

__global__ void nothing() {}

/// Compute capability of this GPU in the form of __CUDA_ARCH__: 900 for 9.0.
int architecture_of_gpu() {
  static const int architecture = [] {
    int device = 0, major = 0, minor = 0;
    require(cudaGetDevice(&device), "cudaGetDevice");
    require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    require(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    return 100 * major + 10 * minor;
  }();
  return architecture;
}

}  // namespace

std::string compiled_architectures() {
  std::string text;
  for (const int architecture : kArchitectures)
    text +=
        (text.empty() ? "" : ", ") + std::to_string(architecture / 100) + "." + std::to_string(architecture / 10 % 10);
  return text;
}

int earliest_architecture() { return *std::min_element(std::begin(kArchitectures), std::end(kArchitectures)) / 10; }

bool has_code_for_gpu() {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, nothing);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();
    return false;
  }
  require(status, "cudaFuncGetAttributes");
  return true;
}

bool has_clusters() {
  for (const int architecture : kArchitectures)
    if (architecture >= 900 && architecture <= architecture_of_gpu()) return true;
  return false;
}

bool is_hopper() { return has_clusters() && architecture_of_gpu() == 900; }

}  // namespace weft::kernels::cuda
