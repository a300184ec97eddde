// SPDX-License-Identifier: Apache-2.0
//
// Collectives on the memory that kernels use, in the order of an execution's stream.
//
//   host memory      MPI
//   GPUs, direct     GPUs of one host that can access each other's memory write into it (parallel/peers.hpp), if the
//                    receiving memory is an ExchangeBuffer or the message fits the bounce buffer; also small reductions
//   GPUs, NCCL       the call returns at once and the host waits for nothing; a CUDA graph can contain it
//   GPUs, staged     without NCCL: MPI through page-locked host memory (no CUDA-aware MPI needed); the call blocks
//
// Floating-point sums are formed in rank order from gathered values in all cases; integer sums are exact in any order.
//
// Invariant of direct exchanges: each exchange begins and ends with a barrier of the GPUs (Peers::Channel) that
// occupies a stream until all ranks have reached it. All ranks must therefore issue their direct exchanges in the same
// order, also those of different axes and different streams: if rank 0 issues exchange A before B, and rank 1 issues B
// before A, and the two share a hardware queue on either GPU, each waits for the other and the job hangs until the
// watchdog ends it. In practice: decide whether an exchange takes place from values that all ranks share (settings,
// global sizes), never from local ones; issue exchanges from one host thread; order streams with events, so that the
// communication stream and the main stream do not overtake each other on some ranks only. A captured graph keeps the
// order of its capture: capture on all ranks at the same step. transcoder/axes/ and the trainer keep it.
//
// Every call has a name, under which its bytes and seconds are counted (parallel/traffic.hpp) and profilers show it
// (device/ranges.hpp). A replayed graph is not counted here: the caller that replays it adds its traffic.
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
  /// Most floating-point values of one `sum`: they are gathered.
  static constexpr std::int64_t kMostValues = 64;
  static constexpr const char* kUnnamed = "other";

  /// Memory of a communicator on one rank. How GPUs reach one another decides which part is allocated; a plan, which
  /// cannot know, counts the largest.
  struct Bytes {
    std::int64_t bounce = 0, gathered = 0;  ///< on the device: direct exchanges; through NCCL
    std::int64_t staging = 0;               ///< on the host: through MPI
    std::int64_t device() const { return std::max(bounce, gathered); }
  };
  static Bytes bytes(std::int64_t n_ranks, std::int64_t largest_message);

  /// `largest_message`: most bytes that a rank sends or receives in one call, except reductions; the size of the
  /// staging memory and of the bounce buffer. It is equal on all ranks. Collective.
  DeviceCommunicator(const Communicator& ranks, const kernels::Execution& execution, std::int64_t largest_message,
                     ExchangeStrategy strategy = {});

  int rank() const { return ranks_->rank(); }
  int size() const { return ranks_->size(); }
  /// True if exchanges into an ExchangeBuffer of these ranks are direct.
  bool is_direct() const { return channel_ != nullptr; }

  /// Fills piece r of `all` (bytes[r] long, contiguous) from `own` of rank r, which may be that piece.
  void all_gather(const void* own, void* all, std::span<const std::int64_t> bytes, const char* name = kUnnamed);
  /// Gathers the pieces of all ranks in place.
  void all_gather(void* all, std::span<const std::int64_t> bytes, const char* name = kUnnamed);
  /// Gathers in place. Direct exchanges are received in `through` (as large as `all`) and copied from there, except
  /// the piece of this rank.
  void all_gather(void* all, std::span<const std::int64_t> bytes, const ExchangeBuffer& through, const char* name);
  /// Gathers in place pieces of equal size. *needed, on the device and the same on all ranks: 0 if no rank reads what
  /// it receives. Direct exchanges then send nothing; the others send nevertheless, since the host does not have the
  /// value.
  void all_gather_if(const std::uint32_t* needed, kernels::Array<std::uint32_t> all, const char* name = kUnnamed);
  /// Sends piece r to rank r, like Communicator::all_to_all.
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                  std::span<const std::int64_t> receive_bytes, const char* name = kUnnamed);

  /// Fills rows of_rank[r] of `all` from those of rank r. The rows may be strided. Requires direct exchanges and `all`
  /// in an ExchangeBuffer.
  void all_gather_rows(const kernels::AnyMatrix& all, std::span<const Range> of_rank, const char* name = kUnnamed);
  /// Sends piece p of `send` (bytes[p] long, equal on all ranks) to rank p, which receives one piece of bytes[p] from
  /// each rank, in rank order. Pieces are contiguous on both sides.
  void send_to_owners(const void* send, std::span<const std::int64_t> bytes, void* receive,
                      const char* name = kUnnamed);

  /// rows, contiguous, fp32, bf16 or fp16, become their sums over the ranks, added in fp32 in rank order. In one
  /// exchange, with all rows of all ranks gathered in `gathered` unless exchanges are direct: for few rows.
  void sum_rows(const kernels::AnyMatrix& rows, void* gathered, const char* name = kUnnamed);
  /// Sums over the ranks, in place, elementwise; all ranks get the same result.
  void sum(kernels::Array<std::int64_t> values, const char* name = kUnnamed);
  void sum(kernels::Array<double> values, const char* name = kUnnamed);  ///< in rank order; at most kMostValues
  void maximum(kernels::Array<std::int32_t> values, const char* name = kUnnamed);

  /// True if no call blocks the host: then a graph can contain them.
  bool leaves_the_host_free() const { return !staged_; }

  /// Replaces the observer given at construction (ExchangeStrategy); null: none.
  void observe(const ExchangeObserver* observer) { observer_ = observer; }
  /// True if `exchanges` counts seconds: on GPUs only under an observer that isolates exchanges; with MPI always,
  /// including the time spent waiting for slower ranks.
  bool is_timed() const { return gpus_ == nullptr || (observer_ != nullptr && observer_->isolates()); }
  const Exchanges& exchanges() const { return exchanges_; }
  Traffic traffic() const { return exchanges_.total(); }

  /// From now on `idle` counts calls as idle time of the execution: for an axis whose exchanges are not overlapped with
  /// computation.
  void mark(device::IdleClock* idle) { idle_ = idle; }

 private:
  class Measured;
  /// Throws Error(internal) if a call is larger than `largest_message`: it would write beyond the memory of a
  /// peer.
  void require_room(std::int64_t bytes, const char* name) const;
  void all_gather_through(std::byte* bounce, void* all, std::span<const std::int64_t> bytes);
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
  bool staged_;  // GPU memory, through the host
  const ExchangeObserver* observer_;
  device::IdleClock* idle_ = nullptr;
  device::HostBuffer<std::byte> staged_send_, staged_receive_;
  device::Buffer<double> gathered_;  // [size, kMostValues], through NCCL
  std::int64_t largest_message_;
  ExchangeBuffer bounce_;  // direct: receives pieces whose destination is not an ExchangeBuffer
  Exchanges exchanges_;
};

}  // namespace weft::parallel
