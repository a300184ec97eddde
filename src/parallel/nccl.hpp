// SPDX-License-Identifier: Apache-2.0
//
// NCCL: what ranks exchange between their GPUs, in the order of a stream, without the host. Known here and nowhere
// else. A program built without NCCL has these functions too; `make_group` then finds that it is not possible.
//
// A group is made once for a set of ranks and lives as long as their communicator. Groups are non-blocking: a call that
// needs its peers (to connect) is waited for by asking, so that an error ends the wait. Whatever fails aborts all
// groups of the process first: a kernel that waits for a lost peer would otherwise never let go of the GPU. Nothing
// here waits for ever: making and ending a group have time limits; between them the watchdog has one.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "device/memory.hpp"
#include "parallel/kept_memory.hpp"

namespace weft::parallel {

class Communicator;

namespace nccl {

/// "NCCL 2.28.9", the library's at run time; "" in a program built without it.
std::string version();

/// Whether NCCL may use NVLink multicast (parallel.nvls). False, the default, sets NCCL_NVLS_ENABLE=0 unless the
/// environment has a value. Before the first group.
void allow_multicast(bool allowed);

/// Elementwise; integers only, whose sums are exact in any order.
enum class Reduction { sum, maximum };
enum class Integer { int32, int64 };

class Group {
 public:
  struct State;
  explicit Group(std::unique_ptr<State> state);
  Group(const Group&) = delete;
  ~Group();

  /// As the calls of DeviceCommunicator. Memory of the GPU; work goes to `stream` (cudaStream_t), also while it is
  /// captured. Throw Error(communication).
  void all_gather(const void* own, void* all, std::span<const std::int64_t> bytes, void* stream);
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                  std::span<const std::int64_t> receive_bytes, void* stream);
  void all_reduce(void* values, std::int64_t size, Integer type, Reduction reduction, void* stream);

  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

/// Memory of the GPU for what a group exchanges. NCCL lets peers reach it directly once a step is recorded, and
/// remembers the address; so it is kept memory. (With NCCL 2.28.3 memory that was registered, freed and allocated anew
/// at the same address made the next exchange wait for ever.)
class Memory {
 public:
  /// Throws Error(communication).
  Memory(Group&, std::int64_t bytes);
  Memory(const Memory&) = delete;
  ~Memory();
  void* data() const { return block_.data; }

 private:
  Group::State& group_;
  device::Counted counted_;
  KeptMemory::Block block_;
};

/// The group of `ranks`, each with a GPU of its own; null where there is none to make: one rank, no GPU, no NCCL, or
/// ranks that share a GPU (the last two are said once, by rank 0). Collective. Throws Error(communication).
std::unique_ptr<Group> make_group(const Communicator& ranks);

/// What has gone wrong in any group of this process; "" = nothing that is known. From any thread; never waits.
std::string failure();

}  // namespace nccl
}  // namespace weft::parallel
