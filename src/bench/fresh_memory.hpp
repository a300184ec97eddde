// SPDX-License-Identifier: Apache-2.0
//
// Baseline (benchmark.keep_buffers = false): memory that ranks exchange is allocated anew for each use.
#pragma once

#include "device/memory.hpp"
#include "parallel/exchange_buffer.hpp"

namespace weft::bench {

class FreshMemory final : public parallel::ExchangeMemory {
 public:
  std::unique_ptr<parallel::ExchangeBuffer::Memory> make(std::int64_t bytes) const override {
    return std::make_unique<Fresh>(bytes);
  }

 private:
  class Fresh final : public parallel::ExchangeBuffer::Memory {
   public:
    explicit Fresh(std::int64_t bytes) : bytes_(bytes) {}
    void open() override {
      block_ = device::Buffer<std::byte>(bytes_);
      data_ = block_.data();
    }
    void close() override {
      block_ = {};
      data_ = nullptr;
    }

   private:
    const std::int64_t bytes_;
    device::Buffer<std::byte> block_;
  };
};

}  // namespace weft::bench
