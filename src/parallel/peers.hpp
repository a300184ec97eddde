// SPDX-License-Identifier: Apache-2.0
//
// Ranks whose GPUs are in one host and can access each other's memory. The copy engines write each piece to its
// destination, so that no multiprocessor is occupied. Barriers are flags in that memory (kernels/peers/peers_cuda.hpp):
// the host does not wait, and a CUDA graph can contain them.
//
// A group is created once for a set of ranks and lives as long as their communicator. A program built without CUDA has
// none.
//
// Invariant: all ranks issue their barriers, of all groups and channels, in the same order. A barrier occupies its
// stream until all ranks have reached it; in another order two ranks wait for each other. The callers ensure this
// order: see parallel/device_communicator.hpp, "Invariant of direct exchanges".
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "device/memory.hpp"
#include "kernels/execution.hpp"
#include "kernels/peers/peers_cuda.hpp"

namespace weft::parallel {

class Communicator;

class Peers {
 public:
  struct State;
  explicit Peers(std::unique_ptr<State> state);
  Peers(const Peers&) = delete;
  ~Peers();

  /// The group of several `ranks`, each with its own GPU (they have an NCCL group); null if the GPUs cannot access each
  /// other's memory (several hosts, no peer access, isolated containers); rank 0 then logs the reason. Collective.
  /// Throws Error(communication).
  static std::unique_ptr<Peers> join(const Communicator& ranks);

  /// Memory that every rank of the group can access, of the same size on each. Collective.
  class Memory {
   public:
    /// Throws a collective Error(usage) if one rank cannot allocate it.
    Memory(Peers&, std::int64_t bytes);
    Memory(const Memory&) = delete;
    ~Memory();
    void* data() const { return data_; }

   private:
    [[maybe_unused]] Peers& peers_;  // unused without CUDA
    device::Counted counted_;
    void* data_ = nullptr;
    [[maybe_unused]] std::int64_t bytes_ = 0;
  };

  /// A sequence of exchanges on one stream. Construction and all calls except `write` are collective.
  class Channel {
   public:
    /// Most bytes of a reduction.
    static constexpr std::int64_t kMostReduced = kernels::cuda::kPeerStage;
    /// Most bytes of a sum of rows.
    static constexpr std::int64_t kMostRows = kernels::cuda::kPeerRows;

    explicit Channel(Peers&);
    Channel(const Channel&) = delete;
    ~Channel();

    /// Barrier before the writes of an exchange: work enqueued later runs once all ranks have reached it, so the memory
    /// they receive into is free.
    void begin(const kernels::Execution&);
    /// Barrier after the writes: work enqueued later runs once all ranks have completed theirs.
    void end(const kernels::Execution&);
    /// A complete exchange: elementwise reduction in rank order, of at most kMostReduced bytes.
    void sum(const kernels::Execution&, kernels::Array<std::int64_t> values);
    void sum(const kernels::Execution&, kernels::Array<double> values);
    void maximum(const kernels::Execution&, kernels::Array<std::int32_t> values);
    void sum_rows(const kernels::Execution&, kernels::AnyMatrix rows);
    /// Gathers like kernels::cuda::all_gather_if, for any size.
    void all_gather_if(const kernels::Execution&, const std::uint32_t* needed, kernels::Array<std::uint32_t> all);
    /// Between `begin` and `end`: copies `rows` rows of `row_bytes` from own memory to `rank`, to the address that
    /// corresponds to `place` (in memory of the group) there. Pitches are the bytes between rows.
    void write(const kernels::Execution&, int rank, void* place, std::int64_t pitch, const void* from,
               std::int64_t from_pitch, std::int64_t row_bytes, std::int64_t rows);

   private:
    [[maybe_unused]] Peers& peers_;  // unused without CUDA
    [[maybe_unused]] std::size_t index_;
    /// The group as the kernels use it, with the word that they set when they are aborted.
    [[maybe_unused]] const kernels::cuda::PeerGroup& group();

    kernels::cuda::PeerGroup group_{};
  };

  /// True if `place` is in memory of this group.
  bool has(const void* place) const;

  /// Aborts pending exchanges of all groups of this process, so that the process can end; their results are undefined.
  /// From any thread.
  static void abort_all();
  /// Exchanges that are aborted set step->withheld and guard->halted, in device memory, before later work on their
  /// stream runs: no update uses what did not arrive. Applies to calls of channels from now on. Null: nothing is set.
  static void withhold_when_aborted(kernels::AdamStep* step, kernels::StepGuard* guard);

 private:
  std::unique_ptr<State> state_;
};

}  // namespace weft::parallel
