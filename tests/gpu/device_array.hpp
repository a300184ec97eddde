// SPDX-License-Identifier: Apache-2.0
//
// Device memory for the GPU tests and benchmarks: a vector that lives on the GPU. No MPI, no Kokkos, so that these
// programs run on a machine that has neither.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"

namespace weft::testing {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::int64_t size = 0) : size_(size) {
    if (size > 0) check_cuda(cudaMalloc(&data_, static_cast<std::size_t>(size) * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(static_cast<std::int64_t>(host.size())) {
    upload(host);
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  std::int64_t size() const { return size_; }
  kernels::Array<T> array() const { return {data_, size_}; }
  void upload(const std::vector<T>& host) {
    if (size_ > 0)
      check_cuda(cudaMemcpy(data_, host.data(), static_cast<std::size_t>(size_) * sizeof(T), cudaMemcpyHostToDevice),
                 "upload");
  }
  std::vector<T> download() const {
    std::vector<T> host(static_cast<std::size_t>(size_));
    if (size_ > 0)
      check_cuda(cudaMemcpy(host.data(), data_, static_cast<std::size_t>(size_) * sizeof(T), cudaMemcpyDeviceToHost),
                 "download");
    return host;
  }
  /// Fills with a byte, to detect elements that a kernel does not write.
  void poison(int byte = 0xff) {
    if (size_ > 0) check_cuda(cudaMemset(data_, byte, static_cast<std::size_t>(size_) * sizeof(T)), "poison");
  }

 private:
  T* data_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace weft::testing
