// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace weft::device {

/// Locks the pages of host memory that something else owns, and that outlives this object: copies between it and a GPU
/// run at full speed. If locking fails, a warning is logged, and copies are slower. Does nothing without CUDA.
class PageLock {
 public:
  PageLock(void* data, std::int64_t bytes);
  PageLock(const PageLock&) = delete;
  ~PageLock();

 private:
  [[maybe_unused]] void* data_ = nullptr;  // null: not locked
};

}  // namespace weft::device
