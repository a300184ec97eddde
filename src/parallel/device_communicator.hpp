// SPDX-License-Identifier: Apache-2.0
//
// Collectives on the memory that kernels use, in the order of an execution's stream. On the host this is MPI itself.
// Between GPUs it is NCCL: a call returns at once, the host waits for nothing, and a CUDA graph may hold it. GPUs of
// one host that reach one another's memory write there themselves (parallel/peers.hpp) what goes from one
// ExchangeBuffer to another, and the few values of a reduction. Without NCCL the bytes are staged through page-locked
// host memory, so no CUDA-aware MPI is needed; then each call waits.
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
#include "parallel/exchange_buffer.hpp"
#include "parallel/grid.hpp"
#include "parallel/peers.hpp"
#include "parallel/traffic.hpp"

namespace weft::parallel {

class DeviceCommunicator {
 public:
  /// Floating point values that one `sum` can take: they are gathered.
  static constexpr std::int64_t kMostValues = 64;
  static constexpr const char* kUnnamed = "other";

  /// `largest_message`: the most bytes that a rank sends or receives in a call but reductions; staging memory is
  /// sized from it. Collective.
  DeviceCommunicator(const Communicator& ranks, const kernels::Execution& execution, std::int64_t largest_message,
                     ExchangeWay way = {});

  int rank() const { return ranks_->rank(); }
  int size() const { return ranks_->size(); }
  /// Whether what is received into an ExchangeBuffer of these ranks is written straight to its place.
  bool is_direct() const { return channel_ != nullptr; }

  /// Piece r of `all` (bytes[r] long, one after the other) is filled from rank r's `own`, which may be that piece.
  void all_gather(const void* own, void* all, std::span<const std::int64_t> bytes, const char* name = kUnnamed);
  /// In place.
  void all_gather(void* all, std::span<const std::int64_t> bytes, const char* name = kUnnamed);
  /// As Communicator::all_to_all.
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                  std::span<const std::int64_t> receive_bytes, const char* name = kUnnamed);

  /// Rows of_rank[r] of `all` are filled from rank r's, whatever lies between them. Only where exchanges are direct;
  /// `all` lies in an ExchangeBuffer.
  void all_gather_rows(const kernels::AnyMatrix& all, std::span<const Range> of_rank, const char* name = kUnnamed);
  /// Piece p of `send` (bytes[p] long, the same on every rank) goes to rank p, who receives pieces of bytes[p] from
  /// all, in rank order; pieces lie one after the other on both sides.
  void send_to_owners(const void* send, std::span<const std::int64_t> bytes, void* receive,
                      const char* name = kUnnamed);

  /// In place, elementwise, the same on all ranks.
  void sum(kernels::Array<std::int64_t> values, const char* name = kUnnamed);
  void sum(kernels::Array<double> values, const char* name = kUnnamed);  ///< in rank order; at most kMostValues
  void maximum(kernels::Array<std::int32_t> values, const char* name = kUnnamed);

  /// Whether calls leave the host free: then a step that has them can be recorded and replayed.
  bool leaves_the_host_free() const { return !staged_; }

  /// Replaces the observer given at construction (ExchangeWay); null: none.
  void observe(const ExchangeObserver* observer) { observer_ = observer; }
  const ExchangeObserver* observer() const { return observer_; }
  /// Whether `exchanges` counts seconds: of GPUs only under an observer that isolates exchanges; of MPI always, the
  /// wait for later ranks included.
  bool is_timed() const { return gpus_ == nullptr || (observer_ != nullptr && observer_->isolates()); }
  const Exchanges& exchanges() const { return exchanges_; }
  Traffic traffic() const { return exchanges_.total(); }

  /// From now on calls are marked as places where the execution stands still: for an axis whose calls stand between
  /// computations, not for one that works beside them.
  void mark(device::IdleClock* idle) { idle_ = idle; }

 private:
  class Measured;
  bool is_direct(const void* receive) const { return is_direct() && peers_->has(receive); }
  bool is_direct_reduction(std::int64_t bytes) const { return is_direct() && bytes <= Peers::Channel::kMostReduced; }
  void write_to_all(void* place, std::int64_t pitch, const void* from, std::int64_t row_bytes, std::int64_t rows);
  template <class T, class Combine>
  void through_the_host(kernels::Array<T> values, Combine&& combine);

  const Communicator* ranks_;
  kernels::Execution execution_;
  nccl::Group* gpus_;  // null: MPI
  Peers* peers_;       // null: not direct
  std::unique_ptr<Peers::Channel> channel_;
  bool staged_;  // bytes of a GPU go through the host
  const ExchangeObserver* observer_;
  device::IdleClock* idle_ = nullptr;
  device::HostBuffer<std::byte> staged_send_, staged_receive_;
  device::Buffer<double> gathered_;  // [size, kMostValues], through NCCL
  std::int64_t largest_message_;
  ExchangeBuffer passage_;  // direct: where pieces arrive that belong into other memory
  Exchanges exchanges_;
};

}  // namespace weft::parallel
