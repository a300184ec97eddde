// SPDX-License-Identifier: Apache-2.0
#include "device/runtime.hpp"

#include <algorithm>
#include <thread>

#include "base/error.hpp"
#include "kernels/runtime.hpp"

#ifdef WEFT_ENABLE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace weft::device {
namespace {

int default_threads(int node_size) {
  const int cores = std::max(1u, std::thread::hardware_concurrency());
  return std::max(1, cores / std::max(1, node_size));
}

}  // namespace

kernels::Backend planned_backend(const Settings& settings) {
  return kernels::kCudaBuild && settings.backend != "portable" ? kernels::Backend::cuda : kernels::Backend::portable;
}

Runtime::Runtime(const Settings& settings, int node_rank, int node_size)
    : threads_(settings.threads > 0 ? settings.threads : default_threads(node_size)) {
#ifdef WEFT_ENABLE_CUDA
  int n_devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&n_devices);
  if (status != cudaSuccess || n_devices == 0)
    throw collective_error(
        ExitCode::usage,
        "no GPU is visible ({}); this build requires one: run it on a node with a GPU, or build with "
        "-DWEFT_ENABLE_CUDA=OFF",
        cudaGetErrorString(status));
  const int device = n_devices == 1 ? 0 : node_rank % n_devices;
  kernels::start(threads_, device);
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
    throw error(ExitCode::internal, "cannot create a CUDA stream on device {}", device);
  execution_.stream = stream;
  execution_.backend = planned_backend(settings);
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
