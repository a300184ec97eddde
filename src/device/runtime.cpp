// SPDX-License-Identifier: Apache-2.0
#include "device/runtime.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/system.hpp"
#include "device/gpu.hpp"
#include "device/host_program.hpp"
#include "kernels/kokkos_runtime.hpp"

#ifdef WEFT_ENABLE_CUDA
#include <cuda_runtime_api.h>

#include "kernels/gpu_architecture.hpp"
#endif
#ifndef WEFT_KOKKOS_ARCH
#define WEFT_KOKKOS_ARCH 0
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

GpuBuild this_build() { return {kernels::cuda::compiled_architectures(), WEFT_KOKKOS_ARCH}; }

/// The GPU of this process, if there is one, as the driver describes it: nothing is created on it.
Gpu gpu_of(int node_rank) {
  Gpu gpu;
  const cudaError_t status = cudaGetDeviceCount(&gpu.count);
  if (status != cudaSuccess || gpu.count == 0) {
    gpu.count = 0;
    gpu.why_none = cudaGetErrorString(status == cudaSuccess ? cudaErrorNoDevice : status);
    return gpu;
  }
  gpu.index = device_of(node_rank, gpu.count);
  cudaDeviceProp properties{};
  cudaGetDeviceProperties(&properties, gpu.index);
  gpu.name = properties.name;
  gpu.major = properties.major;
  gpu.minor = properties.minor;
  return gpu;
}

/// Selects the GPU of this process.
Gpu select_gpu(int node_rank) {
  Gpu gpu = gpu_of(node_rank);
  if (gpu.count == 0) return gpu;
  if (const cudaError_t selected = cudaSetDevice(gpu.index); selected != cudaSuccess)
    throw error(ExitCode::usage, "GPU {} ({}) cannot be used: {}", gpu.index, gpu.name, cudaGetErrorString(selected));
  gpu.has_code = kernels::cuda::has_code_for_gpu();
  return gpu;
}

/// True if the first visible GPU is one of those for which there are only the portable kernels. Without a GPU the
/// answer is for the machine that is planned.
bool only_portable() {
  static const bool found = [] {
    int n_devices = 0, major = kLeastMajor;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) return false;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    return major < kLeastMajor;
  }();
  return found;
}

}  // namespace
#endif

std::string problem_of_gpus() {
  std::string problem;
#ifdef WEFT_ENABLE_CUDA
  for (int index = 0, count = 1; index < count; ++index) {
    Gpu gpu = gpu_of(index);
    count = gpu.count;
    gpu.has_code = kernels::cuda::earliest_architecture() <= 10 * gpu.major + gpu.minor;
    problem = gpu_problem(gpu, this_build());
    if (problem.empty()) break;
  }
#endif
  return problem;
}

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

std::string gpu_name(int node_rank) {
#ifdef WEFT_ENABLE_CUDA
  int n_devices = 0;
  cudaDeviceProp properties{};
  if (cudaGetDeviceCount(&n_devices) == cudaSuccess && n_devices > 0 &&
      cudaGetDeviceProperties(&properties, device_of(node_rank, n_devices)) == cudaSuccess)
    return properties.name;
#else
  static_cast<void>(node_rank);
#endif
  return "";
}

kernels::Backend planned_backend(const Settings& settings) {
  if (!kernels::kCudaBuild || settings.backend == "portable") return kernels::Backend::portable;
#ifdef WEFT_ENABLE_CUDA
  if (settings.backend == "auto" && only_portable()) return kernels::Backend::portable;
#endif
  return kernels::Backend::cuda;
}

Runtime::Runtime(const Settings& settings, int node_rank, int sharing) : threads_(host_threads(settings, sharing)) {
#ifdef WEFT_ENABLE_CUDA
  const Gpu gpu = select_gpu(node_rank);
  if (const std::string obstacle = gpu_obstacle(gpu, this_build(), settings.backend); !obstacle.empty()) {
    // A missing GPU is a property of the node, so all ranks throw the error.
    if (gpu.count == 0) throw collective_error(ExitCode::usage, "{}", obstacle);
    throw error(ExitCode::usage, "{}", obstacle);
  }
  const int device = gpu.index;
  const bool too_old = gpu.major < kLeastMajor;
  if (planned_backend(settings) == kernels::Backend::cuda && too_old)
    throw error(
        ExitCode::usage,
        "device.backend = \"{}\": GPU {} ({}) has compute capability {}.{} (the hand-written kernels need {}.0); "
        "take device.backend = \"portable\"",
        settings.backend, device, gpu.name, gpu.major, gpu.minor, kLeastMajor);
  if (settings.backend == "auto" && too_old)
    log::warning(
        "GPU {} ({}) has compute capability {}.{} (the hand-written kernels need {}.0); the portable kernels run",
        device, gpu.name, gpu.major, gpu.minor, kLeastMajor);
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
                             gpu.count, bus_id, kernels::portable_space(), settings.backend);
  if (!settings.backend_reason.empty()) description_ += fmt::format(" ({})", settings.backend_reason);
#else
  static_cast<void>(node_rank);
  kernels::start(threads_, 0);
  description_ = fmt::format("portable (Kokkos {}, {} thread{}): built without CUDA", kernels::portable_space(),
                             threads_, threads_ == 1 ? "" : "s");
  if (const std::string problem = replaces_cuda_because(); !problem.empty())
    description_ += fmt::format("; in place of the program with CUDA: {}", problem);
#endif
}

Runtime::~Runtime() {
#ifdef WEFT_ENABLE_CUDA
  cudaStreamDestroy(static_cast<cudaStream_t>(execution_.stream));
#endif
  kernels::stop();
}

}  // namespace weft::device
