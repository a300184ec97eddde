// SPDX-License-Identifier: Apache-2.0
//
// NCCL: collectives between GPUs in the order of a stream, without the host. Only this module includes nccl.h. A
// program built without NCCL has these functions too; `make_group` then returns null.
//
// A group is created once for a set of ranks and lives as long as their communicator. Groups are non-blocking: calls
// that connect to peers are polled, so that an error ends the wait. A failing call first aborts all groups of the
// process: otherwise a kernel that waits for a lost peer would occupy the GPU forever. Creating and destroying a group
// have timeouts; during training the watchdog provides one.
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

/// Version of the library at run time, "NCCL 2.28.9"; "" in a program built without NCCL.
std::string version();

/// Allows NVLink multicast (parallel.nvls). False, the default, sets NCCL_NVLS_ENABLE=0 unless the environment defines
/// it. Call it before the first group.
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

  /// The collectives of DeviceCommunicator, on GPU memory. Work is enqueued on `stream` (cudaStream_t), which may be
  /// captured. Throw Error(communication).
  void all_gather(const void* own, void* all, std::span<const std::int64_t> bytes, void* stream);
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                  std::span<const std::int64_t> receive_bytes, void* stream);
  void all_reduce(void* values, std::int64_t size, Integer type, Reduction reduction, void* stream);

  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

/// GPU memory for the exchanges of a group. NCCL gives peers direct access once a step is captured and remembers the
/// address: the memory is therefore kept (kept_memory.hpp). With NCCL 2.28.3, an exchange hangs if memory was
/// registered, freed and allocated again at the same address.
class Memory {
 public:
  /// Throws Error(usage) if out of memory.
  Memory(Group&, std::int64_t bytes);
  Memory(const Memory&) = delete;
  ~Memory();
  void* data() const { return block_.data; }

 private:
  Group::State& group_;
  device::Counted counted_;
  KeptMemory::Block block_;
};

/// True if two ranks use the same GPU; rank 0 then logs a warning. Kernels that wait for a peer would block the rank
/// with which they share the GPU, for which that peer may wait. Collective. False in a program without NCCL.
bool share_gpus(const Communicator& ranks);

/// The group of `ranks`, each with its own GPU; null for one rank, without GPU, without NCCL, or if ranks share a GPU
/// (rank 0 logs a warning for the last two). Collective. Throws Error(communication).
std::unique_ptr<Group> make_group(const Communicator& ranks);

/// Asynchronous error of any group of this process; "" if none is known. From any thread; does not block.
std::string failure();

}  // namespace nccl
}  // namespace weft::parallel
