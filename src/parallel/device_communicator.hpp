// SPDX-License-Identifier: Apache-2.0
//
// Collectives on the memory that kernels use, in the order of an execution's stream. On the host this is MPI itself.
// Between GPUs it is NCCL: a call returns at once, the host waits for nothing, and a CUDA graph may hold it. Without
// NCCL the bytes are staged through page-locked host memory, so no CUDA-aware MPI is needed; then each call waits.
//
// Sums of floating point numbers are formed in rank order from gathered values, on NCCL as on MPI; integers are exact
// in any order.
//
// Every call has a name, under which its bytes and seconds are counted (parallel/traffic.hpp) and a profiler shows it
// (device/ranges.hpp). What a replayed graph sends is not seen here: who replays it counts it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/memory.hpp"
#include "device/stream.hpp"
#include "kernels/execution.hpp"
#include "parallel/communicator.hpp"
#include "parallel/traffic.hpp"

namespace weft::parallel {

namespace nccl {
class Memory;
}

/// Memory that an axis of ranks exchanges, where the kernels run: between GPUs known to NCCL. What is not kept
/// (parallel.keep_buffers) is plain memory, there only between `open` and `close`.
class ExchangeBuffer {
 public:
  ExchangeBuffer() = default;
  ExchangeBuffer(const Communicator& ranks, std::int64_t bytes, bool keep = true);
  std::byte* open();
  void close();
  std::byte* data() const { return data_; }

 private:
  std::shared_ptr<nccl::Memory> known_;  // shared only because a header need not know its destructor
  device::Buffer<std::byte> plain_;
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
  bool keep_ = true;
};

class DeviceCommunicator {
 public:
  /// Floating point values that one `sum` can take: they are gathered.
  static constexpr std::int64_t kMostValues = 64;
  static constexpr const char* kUnnamed = "other";

  /// `largest_message`: the most bytes that all_gather and all_to_all send or receive on this rank; staging memory is
  /// sized from it. Collective.
  DeviceCommunicator(const Communicator& ranks, const kernels::Execution& execution, std::int64_t largest_message);

  int rank() const { return ranks_->rank(); }
  int size() const { return ranks_->size(); }

  /// Piece r of `all` (bytes[r] long, one after the other) is filled from rank r's `own`, which may be that piece.
  void all_gather(const void* own, void* all, std::span<const std::int64_t> bytes, const char* name = kUnnamed);
  /// In place.
  void all_gather(void* all, std::span<const std::int64_t> bytes, const char* name = kUnnamed);
  /// As Communicator::all_to_all.
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                  std::span<const std::int64_t> receive_bytes, const char* name = kUnnamed);

  /// In place, elementwise, the same on all ranks.
  void sum(kernels::Array<std::int64_t> values, const char* name = kUnnamed);
  void sum(kernels::Array<double> values, const char* name = kUnnamed);  ///< in rank order; at most kMostValues
  void maximum(kernels::Array<std::int32_t> values, const char* name = kUnnamed);

  /// Whether calls leave the host free: then a step that has them can be recorded and replayed.
  bool leaves_the_host_free() const { return !staged_; }

  /// From now on the GPU and then the other ranks are waited for before each call, and the GPU behind it, so that
  /// `seconds` is what the exchange itself takes.
  void wait_for_each(bool wait) { wait_for_each_ = wait; }
  /// From now on the host waits behind each call until it is done (parallel.wait).
  void block(bool wait) { blocks_ = wait; }
  /// Whether seconds are seen: of NCCL only with `wait_for_each`; of MPI always, the wait for later ranks included.
  bool is_timed() const { return gpus_ == nullptr || wait_for_each_; }
  const Exchanges& exchanges() const { return exchanges_; }
  Traffic traffic() const { return exchanges_.total(); }

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
  bool wait_for_each_ = false, blocks_ = false;
  device::IdleClock* idle_ = nullptr;
  device::HostBuffer<std::byte> staged_send_, staged_receive_;
  device::Buffer<double> gathered_;  // [size, kMostValues], on GPUs
  Exchanges exchanges_;
};

}  // namespace weft::parallel
