// SPDX-License-Identifier: Apache-2.0
//
// Memory that the processes of a node share: each owns a piece and writes it, all can read every piece.
//
// Room is reserved before a piece is used, so that too little of it is a refusal that all hear, and no process dies of
// SIGBUS at a first touch (MPI's shared windows are files that are only mapped). Nothing is left behind, however a job
// ends: a piece lives as long as a process has it mapped and has no name while it holds anything.
//
// Processes order their reading and writing themselves: what a rank wrote is there for the others after a collective
// call in which all took part.
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
    anonymous,  ///< no file system: any free memory will do; not across user namespaces (Apptainer, one for each rank)
    directory   ///< /dev/shm, as far as it has room (64 MB in many containers)
  };

  /// Collective over `node`: ranks of one host. `own_bytes` may differ between ranks. The first backing that all of
  /// them can use is taken; when there is none, `refusal` says why, on all of them alike.
  NodeMemory(const Communicator& node, std::int64_t own_bytes,
             std::initializer_list<Backing> backings = {Backing::anonymous, Backing::directory});
  NodeMemory(const NodeMemory&) = delete;
  ~NodeMemory();

  /// "": the memory is there.
  const std::string& refusal() const { return refusal_; }
  /// This rank's piece, zero at first.
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

  /// Returns the refusal.
  std::string share(const Communicator& node, std::int64_t own_bytes, Backing backing);
  void unmap();

  std::string refusal_;
  std::size_t own_ = 0;
  std::vector<Piece> pieces_;  // [rank of the node]
};

}  // namespace weft::parallel
