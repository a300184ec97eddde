// SPDX-License-Identifier: Apache-2.0
#include "device/memory.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"

#ifdef WEFT_ENABLE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace weft::device {
namespace {

struct Counter {
  std::atomic<std::int64_t> now{0};
  std::atomic<std::int64_t> peak{0};

  void add(std::int64_t bytes) {
    const std::int64_t total = now += bytes;
    std::int64_t seen = peak;
    while (total > seen && !peak.compare_exchange_weak(seen, total)) {
    }
  }
};

Counter counters[2];

double gib(std::int64_t bytes) { return static_cast<double>(bytes) / (std::int64_t{1} << 30); }

Counter& counter(Allocation::Where where) { return counters[where == Allocation::Where::device ? 0 : 1]; }

#ifdef WEFT_ENABLE_CUDA
void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw error(ExitCode::internal, "{} failed ({})", what, cudaGetErrorString(status));
}
#endif

}  // namespace

Allocation::Allocation(std::int64_t bytes, Where where) : bytes_(bytes), where_(where) {
  if (bytes == 0) return;
#ifdef WEFT_ENABLE_CUDA
  const cudaError_t status = where == Where::device ? cudaMalloc(&data_, bytes) : cudaMallocHost(&data_, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    data_ = nullptr;
  } else {
    check(status, "allocating memory");
  }
#else
  data_ = std::aligned_alloc(64, static_cast<std::size_t>((bytes + 63) / 64 * 64));
#endif
  if (data_ == nullptr)
    throw error(ExitCode::usage,
                "out of memory: cannot allocate {:.2f} GiB on the {} (this rank uses {:.2f} GiB there); take fewer "
                "transcoder.features, a smaller data.batch_tokens or more ranks",
                gib(bytes), where == Where::device ? "device" : "host", gib(counter(where).now.load()));
  counter(where).add(bytes);
}

Allocation::~Allocation() {
  if (data_ == nullptr) return;
  counter(where_).add(-bytes_);
#ifdef WEFT_ENABLE_CUDA
  if (where_ == Where::device)
    cudaFree(data_);
  else
    cudaFreeHost(data_);
#else
  std::free(data_);
#endif
}

Counted::Counted(std::int64_t bytes) : bytes_(bytes) { counter(Allocation::Where::device).add(bytes_); }
Counted::~Counted() { counter(Allocation::Where::device).add(-bytes_); }

void copy(const kernels::Execution& execution, void* to, const void* from, std::int64_t bytes, Direction direction) {
  if (bytes == 0) return;
#ifdef WEFT_ENABLE_CUDA
  const cudaMemcpyKind kind = direction == Direction::to_device ? cudaMemcpyHostToDevice
                              : direction == Direction::to_host ? cudaMemcpyDeviceToHost
                                                                : cudaMemcpyDeviceToDevice;
  check(cudaMemcpyAsync(to, from, bytes, kind, static_cast<cudaStream_t>(execution.stream)), "copying memory");
#else
  static_cast<void>(execution);
  static_cast<void>(direction);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
#endif
}

void zero(const kernels::Execution& execution, void* data, std::int64_t bytes) {
  if (bytes == 0) return;
#ifdef WEFT_ENABLE_CUDA
  check(cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(execution.stream)), "zeroing memory");
#else
  static_cast<void>(execution);
  std::memset(data, 0, static_cast<std::size_t>(bytes));
#endif
}

#ifdef WEFT_ENABLE_CUDA
namespace {
std::pair<std::int64_t, std::int64_t> free_and_total() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "querying device memory");
  return {static_cast<std::int64_t>(free), static_cast<std::int64_t>(total)};
}
}  // namespace
std::int64_t driver_bytes() { return free_and_total().second - free_and_total().first; }
std::int64_t driver_total_bytes() { return free_and_total().second; }
#else
std::int64_t driver_bytes() { return 0; }
std::int64_t driver_total_bytes() { return 0; }
#endif

MemoryUse memory_use() { return {counters[0].now, counters[0].peak, counters[1].now, counters[1].peak}; }

void reset_peak() {
  for (Counter& c : counters) c.peak = c.now.load();
}

}  // namespace weft::device
