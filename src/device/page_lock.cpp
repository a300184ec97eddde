// SPDX-License-Identifier: Apache-2.0
#include "device/page_lock.hpp"

#include "base/log.hpp"

#ifdef WEFT_ENABLE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace weft::device {

#ifdef WEFT_ENABLE_CUDA
PageLock::PageLock(void* data, std::int64_t bytes) {
  if (bytes == 0) return;
  const cudaError_t status = cudaHostRegister(data, static_cast<std::size_t>(bytes), cudaHostRegisterDefault);
  if (status == cudaSuccess) {
    data_ = data;
    return;
  }
  cudaGetLastError();  // otherwise a later check would report it
  log::warning("page-locking {:.1f} GB of host memory failed ({}); copies from the GPU are slower",
               static_cast<double>(bytes) * 1e-9, cudaGetErrorString(status));
}

PageLock::~PageLock() {
  if (data_ != nullptr) cudaHostUnregister(data_);
}
#else
PageLock::PageLock(void*, std::int64_t) {}
PageLock::~PageLock() = default;
#endif

}  // namespace weft::device
