// SPDX-License-Identifier: Apache-2.0
//
// Owned memory. A Buffer is in the memory that kernels use: on the GPU in a CUDA build, otherwise on the host. A
// HostBuffer is always on the host; in a CUDA build it is page-locked, so that copies are asynchronous.
//
// Allocations are counted for `peak_bytes` of benchmark.json and run.json.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/kokkos_runtime.hpp"

namespace weft::device {

/// Uninitialised memory, 64-byte aligned (256 on a GPU). Throws Error(usage) with `bytes` if there is not enough.
class Allocation {
 public:
  enum class Where { device, host };

  Allocation() = default;
  Allocation(std::int64_t bytes, Where where);
  Allocation(Allocation&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), where_(other.where_) {}
  Allocation& operator=(Allocation&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(where_, other.where_);
    return *this;
  }
  ~Allocation();

  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  Where where_ = Where::host;
};

/// Counts device memory that a library allocated on behalf of this program.
class Counted {
 public:
  explicit Counted(std::int64_t bytes);
  Counted(const Counted&) = delete;
  ~Counted();

 private:
  std::int64_t bytes_;
};

template <class T, Allocation::Where where>
class TypedBuffer {
 public:
  TypedBuffer() = default;
  explicit TypedBuffer(std::int64_t size) : memory_(size * static_cast<std::int64_t>(sizeof(T)), where), size_(size) {}

  T* data() const { return static_cast<T*>(memory_.data()); }
  std::int64_t size() const { return size_; }
  std::int64_t bytes() const { return memory_.bytes(); }
  kernels::Array<T> array() const { return {data(), size_}; }
  kernels::Matrix<T> matrix(std::int64_t rows, std::int64_t columns) const { return {data(), rows, columns, columns}; }

 private:
  Allocation memory_;
  std::int64_t size_ = 0;
};

template <class T>
using Buffer = TypedBuffer<T, Allocation::Where::device>;
template <class T>
using HostBuffer = TypedBuffer<T, Allocation::Where::host>;

enum class Direction { to_device, to_host, on_device };

/// Copies `bytes` bytes. In a CUDA build asynchronous on the execution's stream, if host memory is page-locked.
void copy(const kernels::Execution&, void* to, const void* from, std::int64_t bytes, Direction);
/// The value at `data`, where the kernels run. Waits for the stream.
template <class T>
T read(const kernels::Execution& execution, const T* data) {
  T value{};
  copy(execution, &value, data, sizeof value, Direction::to_host);
  kernels::fence(execution);
  return value;
}
/// Fills with zero bytes, on the execution's stream.
void zero(const kernels::Execution&, void* data, std::int64_t bytes);
template <class T>
void zero(const kernels::Execution& execution, kernels::Array<T> values) {
  zero(execution, values.data, values.size * static_cast<std::int64_t>(sizeof(T)));
}

/// Allocated bytes, current and peak since `reset_peak`, on device and host.
struct MemoryUse {
  std::int64_t device_bytes, device_peak_bytes, host_bytes, host_peak_bytes;
};
MemoryUse memory_use();

/// Bytes in use on this process' GPU according to the driver, by all processes and libraries; 0 without a GPU.
std::int64_t driver_bytes();
/// Total memory of the GPU in bytes; 0 without a GPU.
std::int64_t driver_total_bytes();
void reset_peak();

}  // namespace weft::device
