// SPDX-License-Identifier: Apache-2.0
//
// Ranks whose GPUs are in one host and reach one another's memory: what they exchange is written straight to its place
// by the GPUs' copy engines, which leaves all processors to the computation. Flags in that memory say when
// (kernels/peers/peers_cuda.hpp); no host waits, and a graph may hold it.
//
// A group is made once for a set of ranks and lives as long as their communicator. In a program built without CUDA
// there is none.
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

  /// The group of `ranks`, each with a GPU of its own; null where their memory cannot be reached (several hosts, no
  /// way between two GPUs, processes kept apart), which is said once, by rank 0. Collective. Throws Error(usage).
  static std::unique_ptr<Peers> join(const Communicator& ranks);

  /// Memory that every rank of the group reaches, as large on each. Collective.
  class Memory {
   public:
    /// Throws Error(usage), on all ranks, when there is not enough on one.
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

  /// A sequence of exchanges on one stream. Collective, and so are its calls but `write`.
  class Channel {
   public:
    /// Bytes of a reduction at most.
    static constexpr std::int64_t kMostReduced = kernels::cuda::kPeerStage;

    explicit Channel(Peers&);
    Channel(const Channel&) = delete;
    ~Channel();

    /// As kernels/peers/peers_cuda.hpp.
    void meet(const kernels::Execution&);
    void part(const kernels::Execution&);
    void sum(const kernels::Execution&, kernels::Array<std::int64_t> values);
    void sum(const kernels::Execution&, kernels::Array<double> values);
    void maximum(const kernels::Execution&, kernels::Array<std::int32_t> values);
    /// Between the two: `rows` rows of `row_bytes` go to where `place`, which lies in the group's memory, is on `rank`.
    /// `from` is own memory; pitches are bytes from row to row.
    void write(const kernels::Execution&, int rank, void* place, std::int64_t pitch, const void* from,
               std::int64_t from_pitch, std::int64_t row_bytes, std::int64_t rows);

   private:
    [[maybe_unused]] Peers& peers_;  // unused without CUDA
    [[maybe_unused]] std::size_t index_;
    kernels::cuda::PeerGroup meetings_{};
  };

  /// Whether `place` lies in such memory.
  bool has(const void* place) const;

  /// Nobody is waited for any more, in any group of this process: what comes out of its exchanges means nothing. Ends
  /// what is under way, so that the process can end.
  static void give_up();

 private:
  std::unique_ptr<State> state_;
};

}  // namespace weft::parallel
