// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <mutex>
#include <unordered_map>

#include "base/error.hpp"
#include "kernels/shared_memory.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr std::int64_t kWithoutAsking = 48 * 1024;  // static and dynamic bytes that every kernel may use

void require(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) throw Error(ExitCode::internal, what + ": shared memory: " + cudaGetErrorString(status));
}

std::int64_t of_device() {
  static const std::int64_t bytes = [] {
    int device = 0, value = 0;
    require(cudaGetDevice(&device), "cudaGetDevice");
    require(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
    return value;
  }();
  return bytes;
}

struct Known {
  std::int64_t variables = 0, allowed = 0;  // bytes; allowed: of dynamic shared memory
};
std::mutex mutex;
std::unordered_map<const void*, Known> known;  // by kernel; of the one GPU of this process

Known& known_of(const void* kernel, const std::string& name) {
  const auto [found, added] = known.try_emplace(kernel);
  if (added) {
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) known.erase(found);
    require(status, name);
    const auto variables = static_cast<std::int64_t>(attributes.sharedSizeBytes);
    found->second = {variables, kWithoutAsking - variables};
  }
  return found->second;
}

}  // namespace

void allow_shared_memory(const void* kernel, std::int64_t dynamic, const char* name, SharedMemoryOf where) {
  const std::lock_guard lock(mutex);
  Known& k = known_of(kernel, name);
  if (dynamic <= k.allowed) return;
  if (const std::string obstacle = shared_memory_obstacle(dynamic, k.variables, where, of_device()); !obstacle.empty())
    throw Error(ExitCode::internal, std::string(name) + ": " + obstacle);
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dynamic)), name);
  k.allowed = dynamic;
}

std::int64_t most_dynamic_shared_memory(const void* kernel) {
  const std::lock_guard lock(mutex);
  return of_device() - known_of(kernel, "cudaFuncGetAttributes").variables;
}

}  // namespace weft::kernels::cuda
