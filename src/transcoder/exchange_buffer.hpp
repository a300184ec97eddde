// SPDX-License-Identifier: Apache-2.0
//
// Memory of an exchange, where the kernels run: kept, or with parallel.keep_buffers = false there only between `open`
// and `close`.
#pragma once

#include "device/memory.hpp"
#include "transcoder/configuration.hpp"

namespace weft::transcoder {

class ExchangeBuffer {
 public:
  ExchangeBuffer() = default;
  ExchangeBuffer(std::int64_t bytes, const ExchangeManner& manner) : bytes_(bytes), keep_(manner.keep_buffers) {
    if (keep_) memory_ = device::Buffer<std::byte>(bytes_);
  }
  std::byte* open() {
    if (!keep_) memory_ = device::Buffer<std::byte>(bytes_);
    return data();
  }
  void close() {
    if (!keep_) memory_ = {};
  }
  std::byte* data() const { return memory_.data(); }

 private:
  device::Buffer<std::byte> memory_;
  std::int64_t bytes_ = 0;
  bool keep_ = true;
};

}  // namespace weft::transcoder
