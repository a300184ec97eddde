// SPDX-License-Identifier: Apache-2.0
#include "parallel/nccl.hpp"

#include <string>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/fault.hpp"
#include "base/log.hpp"
#include "parallel/communicator.hpp"
#include "parallel/peers.hpp"

#ifdef WEFT_ENABLE_NCCL
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <thread>
#include <vector>
#endif

namespace weft::parallel::nccl {
#ifdef WEFT_ENABLE_CUDA
namespace {

/// Logged by rank 0, once per process.
void warn_staged(const Communicator& ranks, const std::string& why) {
  static bool warned = false;
  if (ranks.rank() == 0 && !warned) log::warning("ranks exchange through host memory and MPI, which is slow ({})", why);
  warned = true;
}

}  // namespace
#endif

#ifdef WEFT_ENABLE_NCCL

namespace {

constexpr auto kCreationTimeout = std::chrono::seconds(300);
constexpr auto kDestructionTimeout = std::chrono::seconds(10);

bool multicast_allowed = false;

}  // namespace

bool share_gpus(const Communicator& ranks) {
  if (ranks.size() == 1) return false;
  using Uuid = std::array<char, sizeof(cudaUUID_t)>;
  int device = 0;
  cudaDeviceProp properties{};
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess)
    throw error(ExitCode::internal, "cannot read the UUID of the GPU of this process");
  Uuid own;
  std::memcpy(own.data(), properties.uuid.bytes, own.size());
  std::vector<Uuid> all(static_cast<std::size_t>(ranks.size()));
  ranks.all_gather(own.data(), all.data(), static_cast<std::int64_t>(own.size()));
  std::sort(all.begin(), all.end());
  if (std::adjacent_find(all.begin(), all.end()) == all.end()) return false;
  warn_staged(ranks, "several of them share a GPU; start one process per GPU");
  return true;
}

struct Group::State {
  ncclComm_t comm = nullptr;
  std::mutex mutex;  // for every call on `comm`, ncclCommGetAsyncError included
  int rank = 0, size = 1;
  bool aborted = false;
  KeptMemory kept;

  State();
  ~State();
  State(const State&) = delete;

  void abort() {
    if (comm == nullptr || aborted) return;
    aborted = true;
    ncclCommAbort(comm);
  }
  /// Polls a call in progress, at most until `limit`.
  ncclResult_t complete(ncclResult_t result, Clock::time_point limit) const;
};

namespace {

/// The groups of this process: for `failure` and `abort_all`.
struct Groups {
  std::mutex mutex;
  std::set<Group::State*> all;
};
Groups& groups() {
  static Groups all;
  return all;
}

/// Aborts all pending exchanges of this process. The caller holds the mutex of `own`; other groups are skipped while
/// another thread uses them.
void abort_all(Group::State& own) {
  Peers::abort_all();
  const std::lock_guard lock(groups().mutex);
  for (Group::State* group : groups().all) {
    if (group == &own) {
      group->abort();
    } else if (const std::unique_lock other(group->mutex, std::try_to_lock); other) {
      group->abort();
    }
  }
}

std::string described(ncclResult_t result, ncclComm_t comm) {
  const char* more = ncclGetLastError(comm);
  std::string text = ncclGetErrorString(result);
  if (more != nullptr && *more != '\0') text += fmt::format(": {}", more);
  return text;
}

void check(Group::State& group, ncclResult_t result, const char* what, Clock::time_point limit) {
  result = group.complete(result, limit);
  if (result == ncclSuccess) return;
  const std::string why = result == ncclInProgress ? "timeout: not all ranks joined" : described(result, group.comm);
  abort_all(group);
  throw error(ExitCode::communication,
              "{} of GPUs failed on rank {} of {} ({}); set NCCL_DEBUG=INFO for details; restart from the newest "
              "checkpoint",
              what, group.rank, group.size, why);
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
constexpr Clock::time_point never = Clock::time_point::max();  // the watchdog provides the timeout

}  // namespace

Group::State::State() {
  const std::lock_guard lock(groups().mutex);
  groups().all.insert(this);
}

Group::State::~State() {
  {
    const std::lock_guard lock(groups().mutex);
    groups().all.erase(this);
  }
  const std::lock_guard lock(mutex);
  // After an abort peers may still access the memory: leave it to the end of the process.
  if (comm == nullptr || aborted) return;
  // After an error a peer may be gone: do not wait for it.
  if (std::uncaught_exceptions() > 0 ||
      complete(ncclCommFinalize(comm), Clock::now() + kDestructionTimeout) != ncclSuccess) {
    abort();
    return;
  }
  ncclCommDestroy(comm);
  for (const KeptMemory::Block& block : kept.spare()) ncclMemFree(block.data);
}

ncclResult_t Group::State::complete(ncclResult_t result, Clock::time_point limit) const {
  while (result == ncclInProgress && Clock::now() < limit) {
    std::this_thread::yield();
    ncclResult_t state = ncclSuccess;
    result = ncclCommGetAsyncError(comm, &state);
    if (result == ncclSuccess) result = state;
  }
  return result;
}

Group::Group(std::unique_ptr<State> state) : state_(std::move(state)) {}
Group::~Group() = default;

void Group::all_gather(const void* own, void* all, std::span<const std::int64_t> bytes, void* stream) {
  fault::point("collective");
  State& group = *state_;
  const std::lock_guard lock(group.mutex);
  std::byte* to = static_cast<std::byte*>(all);
  const std::int64_t own_bytes = bytes[static_cast<std::size_t>(group.rank)];
  if (std::all_of(bytes.begin(), bytes.end(), [&](std::int64_t each) { return each == own_bytes; })) {
    if (own_bytes == 0) return;
    check(group, ncclAllGather(own, all, static_cast<std::size_t>(own_bytes), ncclUint8, group.comm, stream_of(stream)),
          "an all-gather", never);
    return;
  }
  check(group, ncclGroupStart(), "an all-gather", never);
  for (int r = 0; r < group.size; ++r) {
    const std::int64_t size = bytes[static_cast<std::size_t>(r)];
    // The piece for this rank itself too, unless it is in place.
    if (r != group.rank || own != to) {
      if (own_bytes > 0)
        check(group, ncclSend(own, static_cast<std::size_t>(own_bytes), ncclUint8, r, group.comm, stream_of(stream)),
              "an all-gather", never);
      if (size > 0)
        check(group, ncclRecv(to, static_cast<std::size_t>(size), ncclUint8, r, group.comm, stream_of(stream)),
              "an all-gather", never);
    }
    to += size;
  }
  check(group, ncclGroupEnd(), "an all-gather", never);
}

void Group::all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                       std::span<const std::int64_t> receive_bytes, void* stream) {
  fault::point("collective");
  State& group = *state_;
  const std::lock_guard lock(group.mutex);
  const std::byte* from = static_cast<const std::byte*>(send);
  std::byte* to = static_cast<std::byte*>(receive);
  check(group, ncclGroupStart(), "an all-to-all", never);
  // The piece for this rank itself too: NCCL copies it on the GPU.
  for (int r = 0; r < group.size; ++r) {
    const std::int64_t out = send_bytes[static_cast<std::size_t>(r)], in = receive_bytes[static_cast<std::size_t>(r)];
    if (out > 0)
      check(group, ncclSend(from, static_cast<std::size_t>(out), ncclUint8, r, group.comm, stream_of(stream)),
            "an all-to-all", never);
    if (in > 0)
      check(group, ncclRecv(to, static_cast<std::size_t>(in), ncclUint8, r, group.comm, stream_of(stream)),
            "an all-to-all", never);
    from += out;
    to += in;
  }
  check(group, ncclGroupEnd(), "an all-to-all", never);
}

Memory::Memory(Group& group, std::int64_t bytes) : group_(group.state()), counted_(bytes) {
  if (bytes == 0) return;
  const std::lock_guard lock(group_.mutex);
  block_ = group_.kept.take(bytes);
  if (block_.data != nullptr) return;
  block_.bytes = bytes;
  if (ncclMemAlloc(&block_.data, static_cast<std::size_t>(bytes)) != ncclSuccess) {
    block_ = {};
    throw error(
        ExitCode::usage,
        "out of memory: exchanges need {} more bytes on the GPU of rank {} ({}); use a smaller batch or more ranks",
        bytes, group_.rank, ncclGetLastError(nullptr));
  }
}

Memory::~Memory() {
  if (block_.data == nullptr) return;
  const std::lock_guard lock(group_.mutex);
  group_.kept.give(block_);
}

void Group::all_reduce(void* values, std::int64_t size, Integer type, Reduction reduction, void* stream) {
  fault::point("collective");
  if (size == 0) return;
  State& group = *state_;
  const std::lock_guard lock(group.mutex);
  check(group,
        ncclAllReduce(values, values, static_cast<std::size_t>(size), type == Integer::int32 ? ncclInt32 : ncclInt64,
                      reduction == Reduction::sum ? ncclSum : ncclMax, group.comm, stream_of(stream)),
        "a reduction", never);
}

std::string version() {
  int code = 0;
  if (ncclGetVersion(&code) != ncclSuccess) return "NCCL";
  return fmt::format("NCCL {}.{}.{}", code / 10000, code / 100 % 100, code % 100);
}

void allow_multicast(bool allowed) { multicast_allowed = allowed; }

std::unique_ptr<Group> make_group(const Communicator& ranks) {
  if (ranks.size() == 1) return nullptr;
  if (share_gpus(ranks)) return nullptr;
  if (!multicast_allowed) ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  auto state = std::make_unique<Group::State>();
  state->rank = ranks.rank();
  state->size = ranks.size();
  ncclUniqueId id{};
  if (ranks.rank() == 0) check(*state, ncclGetUniqueId(&id), "creating an NCCL id", never);
  ranks.broadcast(&id, sizeof id);
  {
    const std::lock_guard lock(state->mutex);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    check(*state, ncclCommInitRankConfig(&state->comm, ranks.size(), id, ranks.rank(), &config), "joining a group",
          Clock::now() + kCreationTimeout);
  }
  return std::make_unique<Group>(std::move(state));
}

std::string failure() {
  const std::unique_lock lock(groups().mutex, std::try_to_lock);
  if (!lock) return {};
  for (Group::State* group : groups().all) {
    // If the group is locked, the thread that holds it polls NCCL.
    const std::unique_lock unused(group->mutex, std::try_to_lock);
    if (!unused || group->comm == nullptr || group->aborted) continue;
    ncclResult_t state = ncclSuccess;
    ncclResult_t result = ncclCommGetAsyncError(group->comm, &state);
    if (result == ncclSuccess) result = state;
    if (result != ncclSuccess && result != ncclInProgress)
      return fmt::format("NCCL error in the group of {} GPUs: {}", group->size, described(result, group->comm));
  }
  return {};
}

#else

struct Group::State {};
Memory::Memory(Group& group, std::int64_t bytes) : group_(group.state()), counted_(bytes) {}
Memory::~Memory() = default;
Group::Group(std::unique_ptr<State> state) : state_(std::move(state)) {}
Group::~Group() = default;

namespace {
[[noreturn]] void not_built() { throw error(ExitCode::internal, "this program was built without NCCL"); }
}  // namespace

void Group::all_gather(const void*, void*, std::span<const std::int64_t>, void*) { not_built(); }
void Group::all_to_all(const void*, std::span<const std::int64_t>, void*, std::span<const std::int64_t>, void*) {
  not_built();
}
void Group::all_reduce(void*, std::int64_t, Integer, Reduction, void*) { not_built(); }

std::string version() { return {}; }
void allow_multicast(bool) {}
bool share_gpus(const Communicator&) { return false; }

std::unique_ptr<Group> make_group(const Communicator& ranks) {
#ifdef WEFT_ENABLE_CUDA
  if (ranks.size() > 1)
    warn_staged(ranks, "this program was built without NCCL; configure it with -DWEFT_ENABLE_NCCL=ON");
#else
  static_cast<void>(ranks);
#endif
  return nullptr;
}

std::string failure() { return {}; }

#endif

}  // namespace weft::parallel::nccl
