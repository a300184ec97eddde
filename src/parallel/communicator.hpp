// SPDX-License-Identifier: Apache-2.0
//
// A group of ranks and its collective operations on host memory. Only parallel/ includes mpi.h.
//
// Sums of floating-point numbers are formed in rank order from gathered values, never by MPI's own reduction, whose
// order is implementation-defined: the same bits on every rank and in every run. Integer sums are exact in any order.
// All counts are 64-bit; messages above 2^30 bytes are sent in pieces. Failed calls throw Error(communication).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace weft::parallel {

struct GpuGroups;

class Communicator {
 public:
  /// The ranks of the whole job; before MPI is initialised, this process alone, which then needs no MPI.
  static Communicator world();

  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;
  ~Communicator();

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Ranks with the same colour form a group, ordered by key. Collective.
  Communicator split(int colour, int key) const;
  /// The ranks on the node of this rank, in the same order. Collective.
  Communicator split_by_node() const;
  /// A communicator of these ranks with a separate communication context, for another thread. Collective.
  Communicator duplicate() const;

  void barrier() const;
  void broadcast(void* data, std::int64_t bytes, int root = 0) const;
  std::string broadcast(std::string text, int root = 0) const;

  /// `receive` holds size() pieces of `bytes`, in rank order.
  void all_gather(const void* send, void* receive, std::int64_t bytes) const;
  /// Piece r has receive_bytes[r] bytes. Pieces are contiguous, in rank order.
  void all_gather_uneven(const void* send, void* receive, std::span<const std::int64_t> receive_bytes) const;
  /// Piece r of `send` (send_bytes[r] long) goes to rank r. Pieces are contiguous on both sides.
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                  std::span<const std::int64_t> receive_bytes) const;

  /// Sums over the ranks, in place, elementwise.
  void sum(std::span<std::int64_t> values) const;
  void sum(std::span<double> values) const;  ///< in rank order
  void minimum(std::span<std::int64_t> values) const;
  void maximum(std::span<std::int64_t> values) const;

  /// A non-blocking maximum: ranks agree during a step without waiting. `wait` completes it.
  class PendingMaximum {
   public:
    PendingMaximum();
    PendingMaximum(PendingMaximum&&) noexcept;
    PendingMaximum& operator=(PendingMaximum&&) noexcept;
    ~PendingMaximum();
    bool active() const;
    /// The elementwise maximum over the ranks.
    std::vector<std::int64_t> wait();

   private:
    friend class Communicator;
    struct State;
    std::unique_ptr<State> state_;
  };
  PendingMaximum start_maximum(std::vector<std::int64_t> values) const;

  /// Where parallel/gpu_groups.hpp keeps the groups of the GPUs of these ranks, as long as this object lives.
  std::shared_ptr<GpuGroups>& gpu_groups() const;

  /// Pointer to the MPI_Comm of this group, for the other files of parallel/.
  void* native() const;

 private:
  struct Handle;
  explicit Communicator(std::unique_ptr<Handle> handle);

  std::unique_ptr<Handle> handle_;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace weft::parallel
