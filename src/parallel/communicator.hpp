// SPDX-License-Identifier: Apache-2.0
//
// A group of ranks and what they can do together on host memory. MPI is known here and nowhere else.
//
// Sums of floating point numbers are formed in rank order from gathered values, never by MPI's own reduction, whose
// order is the library's choice: the same bits on every rank and in every run. Integer sums are exact in any order. All
// counts are 64-bit; messages beyond 2^31 bytes are cut into pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace weft::parallel {

namespace nccl {
class Group;
}
class Peers;

class Communicator {
 public:
  /// The ranks of the whole job; MPI must be running.
  static Communicator world();

  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;
  ~Communicator();

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Ranks that give the same color form a group, ordered by key. Collective.
  Communicator split(int color, int key) const;
  /// The ranks that run on this one's node, in the same order. Collective.
  Communicator split_by_node() const;
  /// The same ranks with messages of their own: for another thread. Collective.
  Communicator duplicate() const;

  void barrier() const;
  void broadcast(void* data, std::int64_t bytes, int root = 0) const;
  std::string broadcast(std::string text, int root = 0) const;

  /// receive holds size() pieces of `bytes`, in rank order.
  void all_gather(const void* send, void* receive, std::int64_t bytes) const;
  /// Piece r has receive_bytes[r] bytes; they follow one another in rank order.
  void all_gather_uneven(const void* send, void* receive, std::span<const std::int64_t> receive_bytes) const;
  /// Piece r of `send` (send_bytes[r] long) goes to rank r; pieces lie one after the other on both sides.
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                  std::span<const std::int64_t> receive_bytes) const;

  /// In place, elementwise.
  void sum(std::span<std::int64_t> values) const;
  void sum(std::span<double> values) const;  ///< in rank order
  void minimum(std::span<std::int64_t> values) const;
  void maximum(std::span<std::int64_t> values) const;

  /// A maximum in flight: what ranks agree on travels beside the step. Complete it with `wait`.
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

  /// The GPUs of these ranks, joined on first use (which is collective); null where they exchange by way of MPI
  /// (parallel/nccl.hpp). They live as long as this object.
  nccl::Group* gpus() const;
  /// The same GPUs, where each reaches the others' memory; null where they do not (parallel/peers.hpp).
  Peers* peers() const;

  /// MPI_Comm of this group, as an opaque word, for the other files of parallel/.
  void* native() const;

 private:
  struct Handle;
  explicit Communicator(std::unique_ptr<Handle> handle);

  std::unique_ptr<Handle> handle_;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace weft::parallel
