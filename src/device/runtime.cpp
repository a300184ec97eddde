// SPDX-License-Identifier: Apache-2.0
#include "device/runtime.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <thread>

#include "base/error.hpp"
#include "base/system.hpp"
#include "kernels/runtime.hpp"

#ifdef WEFT_ENABLE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace weft::device {

int requested_threads(const Settings& settings) {
  if (settings.threads > 0) return settings.threads;
  const char* const variable = std::getenv("OMP_NUM_THREADS");  // "4"; of "4,2" the outer level
  return variable == nullptr ? 0
                             : static_cast<int>(std::clamp<long>(std::strtol(variable, nullptr, 10), 0, usable_cpus()));
}

int host_threads(const Settings& settings, int sharing) {
  const int hardware = usable_cpus();
  const int limit = std::min(hardware, kernels::most_threads());
  if (const int requested = requested_threads(settings); settings.threads == 0 && requested > 0)
    return std::min(requested, limit);
  if (settings.threads == 0) return std::clamp(hardware / std::max(1, sharing), 1, limit);
  if (settings.threads > limit)
    throw error(ExitCode::usage,
                "device.threads = {} is more than {} ({}); set it to at most {}, or to 0 for the share of this process",
                settings.threads, limit,
                limit < hardware ? "the library of the portable kernels can start no more"
                                 : "the hardware threads that this process may use; mpirun binds it to a part of them "
                                   "unless --bind-to none is given",
                limit);
  return settings.threads;
}

#ifdef WEFT_ENABLE_CUDA
namespace {
int device_of(int node_rank, int n_devices) { return n_devices == 1 ? 0 : node_rank % n_devices; }
}  // namespace
#endif

std::string gpu_bus_id(int node_rank) {
  std::string id;
#ifdef WEFT_ENABLE_CUDA
  char name[32] = "";
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) return id;
  if (cudaDeviceGetPCIBusId(name, sizeof name, device_of(node_rank, n_devices)) == cudaSuccess) id = name;
  for (char& letter : id) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
#else
  static_cast<void>(node_rank);
#endif
  return id;
}

kernels::Backend planned_backend(const Settings& settings) {
  return kernels::kCudaBuild && settings.backend != "portable" ? kernels::Backend::cuda : kernels::Backend::portable;
}

Runtime::Runtime(const Settings& settings, int node_rank, int sharing) : threads_(host_threads(settings, sharing)) {
#ifdef WEFT_ENABLE_CUDA
  int n_devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&n_devices);
  if (status != cudaSuccess || n_devices == 0)
    throw collective_error(
        ExitCode::usage,
        "no GPU is visible ({}); this build requires one: run it on a node with a GPU, or build with "
        "-DWEFT_ENABLE_CUDA=OFF",
        cudaGetErrorString(status));
  const int device = device_of(node_rank, n_devices);
  cudaDeviceProp properties{};
  cudaGetDeviceProperties(&properties, device);
  if (planned_backend(settings) == kernels::Backend::cuda && properties.major < 8)
    throw error(
        ExitCode::usage,
        "device.backend = \"{}\": GPU {} ({}) has compute capability {}.{} (the hand-written kernels need 8.0); "
        "take device.backend = \"portable\"",
        settings.backend, device, properties.name, properties.major, properties.minor);
  kernels::start(threads_, device);
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
    throw error(ExitCode::internal, "cannot create a CUDA stream on device {}", device);
  execution_.stream = stream;
  execution_.backend = planned_backend(settings);
  execution_.tf32 = settings.tf32;
  char bus_id[32] = "bus unknown";
  cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device);
  description_ = fmt::format("{} on GPU {} of {} ({}, {}): backend = \"{}\"",
                             execution_.backend == kernels::Backend::cuda ? "cuda" : "portable (Kokkos Cuda)", device,
                             n_devices, bus_id, kernels::portable_space(), settings.backend);
#else
  static_cast<void>(node_rank);
  kernels::start(threads_, 0);
  description_ = fmt::format("portable (Kokkos {}, {} thread{}): built without CUDA", kernels::portable_space(),
                             threads_, threads_ == 1 ? "" : "s");
#endif
}

Runtime::~Runtime() {
#ifdef WEFT_ENABLE_CUDA
  cudaStreamDestroy(static_cast<cudaStream_t>(execution_.stream));
#endif
  kernels::stop();
}

}  // namespace weft::device
