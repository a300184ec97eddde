// SPDX-License-Identifier: Apache-2.0
//
// Collectives on the memory that kernels use, in the order of an execution's stream. On the host this is MPI itself.
// Between GPUs it is NCCL: a call returns at once, the host waits for nothing, and a CUDA graph may hold it. Without
// NCCL the bytes are staged through page-locked host memory, so no CUDA-aware MPI is needed; then each call waits.
//
// Sums of floating point numbers are formed in rank order from gathered values, on NCCL as on MPI; integers are exact
// in any order.
//
// Bytes and exposed seconds are counted: what the profile of a step reports for this axis. What a replayed graph sends
// is not seen here: who replays it counts it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/memory.hpp"
#include "device/stream.hpp"
#include "kernels/execution.hpp"
#include "parallel/communicator.hpp"

namespace weft::parallel {

namespace nccl {
class Memory;
}

struct Traffic {
  std::int64_t bytes_sent = 0;  ///< by this rank to others; of a reduction: as if all values were gathered
  double seconds = 0;           ///< that this rank waited in the calls: the host, or with `wait_for_each` the GPU
  std::int64_t calls = 0;

  Traffic& operator+=(const Traffic& other) {
    bytes_sent += other.bytes_sent;
    seconds += other.seconds;
    calls += other.calls;
    return *this;
  }
  friend Traffic operator-(const Traffic& a, const Traffic& b) {
    return {a.bytes_sent - b.bytes_sent, a.seconds - b.seconds, a.calls - b.calls};
  }
};

/// Memory that an axis of ranks exchanges, where the kernels run: between GPUs registered with NCCL once.
class ExchangeBuffer {
 public:
  ExchangeBuffer() = default;
  ExchangeBuffer(const Communicator& ranks, std::int64_t bytes);
  std::byte* data() const { return data_; }

 private:
  std::shared_ptr<nccl::Memory> known_;  // shared only because a header need not know its destructor
  device::Buffer<std::byte> plain_;
  std::byte* data_ = nullptr;
};

class DeviceCommunicator {
 public:
  /// Floating point values that one `sum` can take: they are gathered.
  static constexpr std::int64_t kMostValues = 64;

  /// `largest_message`: the most bytes that all_gather and all_to_all send or receive on this rank; staging memory is
  /// sized from it. Collective.
  DeviceCommunicator(const Communicator& ranks, const kernels::Execution& execution, std::int64_t largest_message);

  int rank() const { return ranks_->rank(); }
  int size() const { return ranks_->size(); }

  /// Piece r of `all` (bytes[r] long, one after the other) is filled from rank r's `own`, which may be that piece.
  void all_gather(const void* own, void* all, std::span<const std::int64_t> bytes);
  /// In place.
  void all_gather(void* all, std::span<const std::int64_t> bytes);
  /// As Communicator::all_to_all.
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                  std::span<const std::int64_t> receive_bytes);

  /// In place, elementwise, the same on all ranks.
  void sum(kernels::Array<std::int64_t> values);
  void sum(kernels::Array<double> values);  ///< in rank order; at most kMostValues
  void maximum(kernels::Array<std::int32_t> values);

  /// Whether calls leave the host free: then a step that has them can be recorded and replayed.
  bool leaves_the_host_free() const { return !staged_; }

  /// From now on the GPU is waited for before and after each call, so that `seconds` is what the exchange itself takes
  /// (and the wait for peers who come later).
  void wait_for_each(bool wait) { wait_for_each_ = wait; }
  const Traffic& traffic() const { return traffic_; }

  /// From now on calls are marked as places where the execution stands still: for an axis whose calls stand between
  /// computations, not for one that works beside them.
  void mark(device::IdleClock* idle) { idle_ = idle; }

 private:
  class Measured;
  template <class T, class Combine>
  void through_the_host(kernels::Array<T> values, Combine&& combine);

  const Communicator* ranks_;
  kernels::Execution execution_;
  nccl::Group* gpus_;  // null: MPI
  bool staged_;        // bytes of a GPU go through the host
  bool wait_for_each_ = false;
  device::IdleClock* idle_ = nullptr;
  device::HostBuffer<std::byte> staged_send_, staged_receive_;
  device::Buffer<double> gathered_;  // [size, kMostValues], on GPUs
  Traffic traffic_;
};

}  // namespace weft::parallel
