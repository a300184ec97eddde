// SPDX-License-Identifier: Apache-2.0
//
// How rows [n, L * d] (partial reconstructions, gradient rows) travel between the ranks of a feature group: whole rows
// in one collective, or, with parallel.together = false, layer by layer: one collective for each, and a copy into and
// out of contiguous memory beside it. The result is the same bits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/memory.hpp"
#include "parallel/device_communicator.hpp"
#include "transcoder/configuration.hpp"

namespace weft::transcoder {

/// Memory of an exchange, where the kernels run: kept, or with parallel.keep_buffers = false there only between `open`
/// and `close`.
class ExchangeBuffer {
 public:
  ExchangeBuffer() = default;
  ExchangeBuffer(std::int64_t bytes, const ExchangeManner& manner) : bytes_(bytes), keep_(manner.keep_buffers) {
    if (keep_) memory_ = device::Buffer<std::byte>(bytes_);
  }
  std::byte* open() {
    if (!keep_) memory_ = device::Buffer<std::byte>(bytes_);
    return memory_.data();
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

class RowExchange {
 public:
  /// Bytes of memory for exchanges that send and receive at most these many rows; 0 where whole rows travel.
  static std::int64_t bytes(const ExchangeManner&, std::int64_t layer_bytes, std::int64_t sent_rows,
                            std::int64_t received_rows);

  /// layer_bytes: of one row and layer. The communicator must outlive this.
  RowExchange(parallel::DeviceCommunicator& ranks, const ExchangeManner&, const kernels::Execution&,
              std::int64_t n_layers, std::int64_t layer_bytes, std::int64_t sent_rows, std::int64_t received_rows);

  /// Piece r of `send` (send_rows[r] rows) goes to rank r; pieces lie one after the other on both sides. `name`:
  /// as DeviceCommunicator.
  void all_to_all(const void* send, std::span<const std::int64_t> send_rows, void* receive,
                  std::span<const std::int64_t> receive_rows, const char* name);
  /// Piece r of `rows` is filled by rank r's own piece. In place.
  void all_gather(void* rows, std::span<const std::int64_t> rows_of_rank, const char* name);

 private:
  parallel::DeviceCommunicator& ranks_;
  kernels::Execution execution_;
  bool together_;
  std::int64_t n_layers_, layer_bytes_;
  ExchangeBuffer packed_, arrived_;  // [rows, d] of one layer
};

}  // namespace weft::transcoder
