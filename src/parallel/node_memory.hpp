// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of the processes of a node. Each process owns and writes one piece; all can read every piece.
//
// Memory is reserved before it is used: a shortage is reported on all ranks, and no process receives SIGBUS at a first
// access (MPI shared windows are files that are only mapped). Nothing remains after the job, however it ends: a piece
// exists while a process has it mapped, and its file has no name once it contains data.
//
// Processes must order their reads and writes: a write is visible to the other ranks after a collective call of all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "parallel/communicator.hpp"

namespace weft::parallel {

class NodeMemory {
 public:
  enum class Backing {
    anonymous,  ///< memfd: any free memory; not across user namespaces (one Apptainer instance per rank)
    directory   ///< /dev/shm, within its size limit (64 MB in many containers)
  };

  /// Collective over `node`, the ranks of one host. `own_bytes` may differ between ranks. Uses the first backing that
  /// works on all ranks; if none does, `refusal` is the same text on all ranks.
  NodeMemory(const Communicator& node, std::int64_t own_bytes,
             std::initializer_list<Backing> backings = {Backing::anonymous, Backing::directory});
  NodeMemory(const NodeMemory&) = delete;
  ~NodeMemory();

  /// Why the memory could not be allocated; "" if it was.
  const std::string& refusal() const { return refusal_; }
  /// This rank's piece, initially zero.
  std::byte* own() const { return static_cast<std::byte*>(pieces_[own_].data); }
  /// The piece of a rank of `node`.
  const std::byte* of(int rank) const {
    return static_cast<const std::byte*>(pieces_[static_cast<std::size_t>(rank)].data);
  }

 private:
  struct Piece {
    void* data = nullptr;
    std::size_t bytes = 0;
  };

  /// Returns the refusal; "" on success.
  std::string share(const Communicator& node, std::int64_t own_bytes, Backing backing);
  void unmap();

  std::string refusal_;
  std::size_t own_ = 0;
  std::vector<Piece> pieces_;  // [rank of the node]
};

}  // namespace weft::parallel
