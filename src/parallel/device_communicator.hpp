// SPDX-License-Identifier: Apache-2.0
//
// Collectives on the memory that kernels use, in the order of an execution's stream. On the host this is MPI itself. In
// a CUDA build without NCCL the bytes are staged through page-locked host memory, so no CUDA-aware MPI is needed.
//
// Bytes and exposed seconds are counted: what the profile of a step reports for this axis.
#pragma once

#include <cstdint>
#include <span>

#include "device/memory.hpp"
#include "kernels/execution.hpp"
#include "parallel/communicator.hpp"

namespace weft::parallel {

struct Traffic {
  std::int64_t bytes_sent = 0;  ///< by this rank to others
  double seconds = 0;           ///< that this rank spent in the calls
  std::int64_t calls = 0;
};

class DeviceCommunicator {
 public:
  /// `largest_message`: the most bytes that any call sends or receives on this rank; staging memory is sized from it.
  DeviceCommunicator(const Communicator& ranks, const kernels::Execution& execution, std::int64_t largest_message);

  int rank() const { return ranks_->rank(); }
  int size() const { return ranks_->size(); }

  /// Piece r of `data` (bytes[r] long, one after the other) is filled by rank r's own piece. In place.
  void all_gather(void* data, std::span<const std::int64_t> bytes);
  /// As Communicator::all_to_all.
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                  std::span<const std::int64_t> receive_bytes);

  const Traffic& traffic() const { return traffic_; }

 private:
  const Communicator* ranks_;
  kernels::Execution execution_;
  device::HostBuffer<std::byte> staged_send_, staged_receive_;  // CUDA builds only
  Traffic traffic_;
};

}  // namespace weft::parallel
