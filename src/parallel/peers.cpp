// SPDX-License-Identifier: Apache-2.0
#include "parallel/peers.hpp"

#include "base/error.hpp"
#include "base/fault.hpp"
#include "base/log.hpp"
#include "parallel/communicator.hpp"

#ifdef WEFT_ENABLE_CUDA
#include <cuda_runtime_api.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <vector>

#include "parallel/kept_memory.hpp"
#endif

namespace weft::parallel {

#ifdef WEFT_ENABLE_CUDA
namespace {

constexpr std::size_t kChannels = 16;
/// The driver shares memory in pages of this size: a smaller block would expose its neighbours.
constexpr std::int64_t kPage = 2 << 20;

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw error(ExitCode::communication, "{} failed ({}); restart from the newest checkpoint", what,
                cudaGetErrorString(status));
}

/// A flag in host memory that all groups of the process read; null before the first group. Set by `Peers::abort_all`.
std::atomic<int*> aborted{nullptr};

/// Set by `Peers::withhold_when_aborted`.
kernels::AdamStep* present_step = nullptr;
kernels::StepGuard* present_guard = nullptr;

}  // namespace

struct Peers::State {
  struct Shared {
    KeptMemory::Block own;
    std::vector<void*> of_rank;  // addresses on this rank's GPU
  };

  Communicator ranks;
  std::vector<Shared> shared;  // the first: one PeerPage per channel
  KeptMemory kept;
  std::array<bool, kChannels> channel_is_used{};

  explicit State(const Communicator& all) : ranks(all.duplicate()) {}
  State(const State&) = delete;
  ~State();

  const Shared* holder(const void* place) const {
    const auto found = std::find_if(shared.begin(), shared.end(), [place](const Shared& one) {
      const std::byte* const begin = static_cast<const std::byte*>(one.own.data);
      return place >= begin && place < begin + one.own.bytes;
    });
    return found == shared.end() ? nullptr : &*found;
  }
  bool share(std::int64_t bytes, std::string& why);
  bool writes_arrive() const;
};

/// Allocates memory and maps it on all ranks. Returns false on all ranks if one of them failed. Collective.
bool Peers::State::share(std::int64_t bytes, std::string& why) {
  struct Offer {
    cudaIpcMemHandle_t handle;
    cudaError_t status;
  } offer{};
  Shared made;
  made.own.bytes = (bytes + kPage - 1) / kPage * kPage;
  offer.status = cudaMalloc(&made.own.data, static_cast<std::size_t>(made.own.bytes));
  if (offer.status == cudaSuccess) offer.status = cudaIpcGetMemHandle(&offer.handle, made.own.data);
  std::vector<Offer> all(static_cast<std::size_t>(ranks.size()));
  ranks.all_gather(&offer, all.data(), sizeof offer);
  made.of_rank.resize(all.size());
  std::int64_t worst = 0;
  for (std::size_t r = 0; r < all.size(); ++r) worst = std::max<std::int64_t>(worst, all[r].status);
  cudaError_t opened = cudaSuccess;
  for (std::size_t r = 0; r < all.size() && worst == 0 && opened == cudaSuccess; ++r)
    if (static_cast<int>(r) == ranks.rank())
      made.of_rank[r] = made.own.data;
    else
      opened = cudaIpcOpenMemHandle(&made.of_rank[r], all[r].handle, cudaIpcMemLazyEnablePeerAccess);
  worst = std::max<std::int64_t>(worst, opened);
  ranks.maximum({&worst, 1});
  cudaGetLastError();  // clear the error: it is reported in `why`
  shared.push_back(std::move(made));
  if (worst != 0) why = cudaGetErrorString(static_cast<cudaError_t>(worst));
  return worst == 0;
}

/// Tests writes between all pairs of ranks: with some host settings (IOMMU, PCIe access control) the driver reports
/// peer access, but data are lost. Leaves the pages zeroed. Collective.
bool Peers::State::writes_arrive() const {
  using kernels::cuda::PeerPage;
  constexpr std::size_t kWords = 4096, kBytes = kWords * sizeof(std::uint32_t);
  static_assert(kernels::cuda::kMostPeers * kBytes <= kernels::cuda::kPeerStage);
  const auto page = [this](std::size_t rank) { return static_cast<PeerPage*>(shared.front().of_rank[rank]); };
  const std::size_t own = static_cast<std::size_t>(ranks.rank()), n = shared.front().of_rank.size();
  const auto word = [n](std::size_t from, std::size_t to, std::size_t i) {
    return static_cast<std::uint32_t>((i * n + from) * n + to + 1);
  };
  const auto clear = [&] {
    check(cudaMemset(page(own), 0, kChannels * sizeof(PeerPage)), "clearing flags");
    check(cudaDeviceSynchronize(), "clearing flags");
    ranks.barrier();
  };
  clear();
  std::vector<std::uint32_t> words(kWords);
  for (std::size_t to = 0; to < n; ++to) {
    for (std::size_t i = 0; i < kWords; ++i) words[i] = word(own, to, i);
    check(cudaMemcpy(page(own)->stage[1], words.data(), kBytes, cudaMemcpyHostToDevice), "testing peer access");
    check(cudaMemcpy(page(to)->stage[0] + own * kBytes, page(own)->stage[1], kBytes, cudaMemcpyDeviceToDevice),
          "testing peer access");
    check(cudaDeviceSynchronize(), "testing peer access");
  }
  ranks.barrier();
  std::int64_t wrong = 0;
  for (std::size_t from = 0; from < n; ++from) {
    check(cudaMemcpy(words.data(), page(own)->stage[0] + from * kBytes, kBytes, cudaMemcpyDeviceToHost),
          "testing peer access");
    for (std::size_t i = 0; i < kWords; ++i) wrong += words[i] == word(from, own, i) ? 0 : 1;
  }
  ranks.maximum({&wrong, 1});
  clear();
  return wrong == 0;
}

Peers::State::~State() {
  // After an error a peer may be gone or still access this memory: leave it to the end of the process.
  int mpi_is_over = 0;
  MPI_Finalized(&mpi_is_over);
  if (std::uncaught_exceptions() > 0 || mpi_is_over != 0) return;
  for (const Shared& one : shared)
    for (std::size_t r = 0; r < one.of_rank.size(); ++r)
      if (static_cast<int>(r) != ranks.rank() && one.of_rank[r] != nullptr) cudaIpcCloseMemHandle(one.of_rank[r]);
  try {
    ranks.barrier();  // all ranks have closed their mappings
  } catch (const Error&) {
    return;
  }
  for (const Shared& one : shared) cudaFree(one.own.data);
}

Peers::Peers(std::unique_ptr<State> state) : state_(std::move(state)) {}
Peers::~Peers() = default;

std::unique_ptr<Peers> Peers::join(const Communicator& ranks) {
  std::string why;
  auto state = std::make_unique<State>(ranks);
  if (ranks.size() > kernels::cuda::kMostPeers)
    why = fmt::format("more than {} ranks", kernels::cuda::kMostPeers);
  else if (ranks.split_by_node().size() != ranks.size())
    why = "several hosts";
  else if (state->share(static_cast<std::int64_t>(kChannels * sizeof(kernels::cuda::PeerPage)), why) &&
           !state->writes_arrive())
    why = "written data do not arrive; check the IOMMU and PCIe access control settings of the host";
  if (why.empty()) {
    if (void* word = nullptr; aborted == nullptr) {
      check(cudaHostAlloc(&word, sizeof(int), cudaHostAllocPortable), "allocating a flag");
      *static_cast<int*>(word) = 0;
      aborted = static_cast<int*>(word);
    }
    kernels::cuda::use_barriers();
    return std::make_unique<Peers>(std::move(state));
  }
  if (ranks.rank() == 0) log::info("the {} GPUs cannot access each other's memory ({})", ranks.size(), why);
  return nullptr;
}

Peers::Memory::Memory(Peers& peers, std::int64_t bytes) : peers_(peers), counted_(bytes) {
  if (bytes == 0) return;
  State& state = *peers.state_;
  KeptMemory::Block block = state.kept.take(bytes);
  std::string why;
  if (block.data == nullptr) {
    if (!state.share(bytes, why))
      throw collective_error(
          ExitCode::usage,
          "out of memory: exchanges need {} more bytes on each of {} GPUs ({}); use a smaller batch or more ranks",
          bytes, state.ranks.size(), why);
    block = state.shared.back().own;
  }
  data_ = block.data;
  bytes_ = block.bytes;
}

Peers::Memory::~Memory() {
  if (data_ != nullptr) peers_.state_->kept.give({data_, bytes_});
}

Peers::Channel::Channel(Peers& peers) : peers_(peers) {
  State& state = *peers.state_;
  const auto free = std::find(state.channel_is_used.begin(), state.channel_is_used.end(), false);
  if (free == state.channel_is_used.end())
    throw error(ExitCode::internal, "more than {} concurrent exchanges between GPUs", kChannels);
  *free = true;
  index_ = static_cast<std::size_t>(free - state.channel_is_used.begin());
  group_.aborted = aborted;
  group_.rank = state.ranks.rank();
  group_.size = state.ranks.size();
  const std::vector<void*>& pages = state.shared.front().of_rank;
  for (std::size_t r = 0; r < pages.size(); ++r)
    group_.page[r] = static_cast<kernels::cuda::PeerPage*>(pages[r]) + index_;
}

// The barrier count stays in the page: the next user of the channel continues it.
Peers::Channel::~Channel() { peers_.state_->channel_is_used[index_] = false; }

bool Peers::has(const void* place) const { return state_->holder(place) != nullptr; }

const kernels::cuda::PeerGroup& Peers::Channel::group() {
  group_.step = present_step;
  group_.guard = present_guard;
  return group_;
}

void Peers::Channel::begin(const kernels::Execution& execution) {
  fault::point("collective");
  kernels::cuda::begin_exchange(execution, group());
}
void Peers::Channel::end(const kernels::Execution& execution) { kernels::cuda::end_exchange(execution, group()); }
void Peers::Channel::sum(const kernels::Execution& execution, kernels::Array<std::int64_t> values) {
  fault::point("collective");
  kernels::cuda::sum(execution, group(), values);
}
void Peers::Channel::sum(const kernels::Execution& execution, kernels::Array<double> values) {
  fault::point("collective");
  kernels::cuda::sum(execution, group(), values);
}
void Peers::Channel::maximum(const kernels::Execution& execution, kernels::Array<std::int32_t> values) {
  fault::point("collective");
  kernels::cuda::maximum(execution, group(), values);
}
void Peers::Channel::sum_rows(const kernels::Execution& execution, kernels::AnyMatrix rows) {
  fault::point("collective");
  const std::int64_t bytes = rows.rows * rows.columns * kernels::bytes_of(rows.type);
  kernels::cuda::sum_rows(execution, group(), rows, kernels::cuda::sums_at_once(bytes, group_.size));
}
void Peers::Channel::all_gather_if(const kernels::Execution& execution, const std::uint32_t* needed,
                                   kernels::Array<std::uint32_t> all) {
  fault::point("collective");
  kernels::cuda::all_gather_if(execution, group(), needed, all);
}

void Peers::Channel::write(const kernels::Execution& execution, int rank, void* place, std::int64_t pitch,
                           const void* from, std::int64_t from_pitch, std::int64_t row_bytes, std::int64_t rows) {
  if (row_bytes == 0 || rows == 0) return;
  const State::Shared& holder = *peers_.state_->holder(place);
  std::byte* const there = static_cast<std::byte*>(holder.of_rank[static_cast<std::size_t>(rank)]) +
                           (static_cast<std::byte*>(place) - static_cast<std::byte*>(holder.own.data));
  const cudaStream_t stream = static_cast<cudaStream_t>(execution.stream);
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  if (rows == 1 || (row_bytes == pitch && row_bytes == from_pitch))
    check(cudaMemcpyAsync(there, from, size(row_bytes * rows), cudaMemcpyDeviceToDevice, stream), "writing to a GPU");
  else
    check(cudaMemcpy2DAsync(there, size(pitch), from, size(from_pitch), size(row_bytes), size(rows),
                            cudaMemcpyDeviceToDevice, stream),
          "writing to a GPU");
}

void Peers::abort_all() {
  if (int* const word = aborted; word != nullptr) *static_cast<volatile int*>(word) = 1;
}

void Peers::withhold_when_aborted(kernels::AdamStep* step, kernels::StepGuard* guard) {
  present_step = step;
  present_guard = guard;
}

#else

struct Peers::State {};
Peers::Peers(std::unique_ptr<State> state) : state_(std::move(state)) {}
Peers::~Peers() = default;
std::unique_ptr<Peers> Peers::join(const Communicator&) { return nullptr; }

namespace {
[[noreturn]] void not_built() { throw error(ExitCode::internal, "this program was built without CUDA"); }
}  // namespace

Peers::Memory::Memory(Peers& peers, std::int64_t bytes) : peers_(peers), counted_(bytes) { not_built(); }
Peers::Memory::~Memory() = default;
Peers::Channel::Channel(Peers& peers) : peers_(peers), index_(0) { not_built(); }
Peers::Channel::~Channel() = default;
bool Peers::has(const void*) const { return false; }
void Peers::Channel::begin(const kernels::Execution&) { not_built(); }
void Peers::Channel::end(const kernels::Execution&) { not_built(); }
void Peers::Channel::sum(const kernels::Execution&, kernels::Array<std::int64_t>) { not_built(); }
void Peers::Channel::sum(const kernels::Execution&, kernels::Array<double>) { not_built(); }
void Peers::Channel::maximum(const kernels::Execution&, kernels::Array<std::int32_t>) { not_built(); }
void Peers::Channel::sum_rows(const kernels::Execution&, kernels::AnyMatrix) { not_built(); }
void Peers::Channel::all_gather_if(const kernels::Execution&, const std::uint32_t*, kernels::Array<std::uint32_t>) {
  not_built();
}
void Peers::Channel::write(const kernels::Execution&, int, void*, std::int64_t, const void*, std::int64_t, std::int64_t,
                           std::int64_t) {
  not_built();
}
void Peers::abort_all() {}
void Peers::withhold_when_aborted(kernels::AdamStep*, kernels::StepGuard*) {}

#endif

}  // namespace weft::parallel
