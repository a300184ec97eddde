// SPDX-License-Identifier: Apache-2.0
//
// One block per kernel. A barrier takes about one round trip of a word between GPUs, a few microseconds; a reduction
// reads at most 256 KiB from every peer. Limit: latency.
//
// A stage is reused two exchanges later. By then its readers are done: they entered the exchange in between only after
// they had finished this one, and this rank has waited for them there.
#include <algorithm>

#include "kernels/peers/peers_cuda.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kMostThreads = 1024;

__device__ void write_word(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ std::uint32_t read_word(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

/// Barrier of all ranks, called by all threads of the block. Writes before it are visible to the peers' threads after
/// it. After a barrier that was aborted, this rank no longer lets its peers pass: its data are not complete.
__device__ void exchange_words(const PeerGroup& group, std::uint32_t (PeerPage::*words)[kMostPeers],
                               std::uint32_t number) {
  // Read before the fence, which takes longer.
  bool aborted = group.guard != nullptr && static_cast<const volatile StepGuard*>(group.guard)->halted ==
                                               static_cast<std::int64_t>(kExchangeAborted);
  __threadfence_system();
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r < group.size && r != group.rank) {
    if (!aborted) {
      write_word(&(group.page[r]->*words)[group.rank], number);
      const std::uint32_t* const word = &(group.page[group.rank]->*words)[r];
      // Numbers wrap around. Host memory is slow to read, so the abort flag is polled rarely.
      for (unsigned turn = 1; !aborted && static_cast<std::int32_t>(read_word(word) - number) < 0; ++turn)
        aborted = turn % 4096 == 0 && *static_cast<const volatile int*>(group.aborted) != 0;
    }
    if (aborted && group.guard != nullptr) {
      group.step->withheld = 1;
      group.guard->halted = kExchangeAborted;
    }
  }
  __syncthreads();
}

__global__ void begin_phase(const __grid_constant__ PeerGroup group) {
  exchange_words(group, &PeerPage::begun, group.page[group.rank]->completed + 1);
}

__global__ void end_phase(const __grid_constant__ PeerGroup group) {
  PeerPage& own = *group.page[group.rank];
  const std::uint32_t number = own.completed + 1;
  exchange_words(group, &PeerPage::ended, number);
  if (threadIdx.x == 0) own.completed = number;
}

struct Sum {
  template <class T>
  __device__ static T join(T a, T b) {
    return a + b;
  }
};
struct Maximum {
  template <class T>
  __device__ static T join(T a, T b) {
    return a < b ? b : a;
  }
};

template <class T, class Operation>
__global__ void reduce_over_peers(const __grid_constant__ PeerGroup group, T* values, std::int64_t size) {
  PeerPage& own = *group.page[group.rank];
  const std::uint32_t number = own.completed + 1, parity = number % 2;
  T* const stage = reinterpret_cast<T*>(own.stage[parity]);
  for (std::int64_t i = threadIdx.x; i < size; i += blockDim.x) stage[i] = values[i];
  exchange_words(group, &PeerPage::begun, number);
  for (std::int64_t i = threadIdx.x; i < size; i += blockDim.x) {
    T all = __ldcv(reinterpret_cast<const T*>(group.page[0]->stage[parity]) + i);
#pragma unroll 4
    for (int r = 1; r < group.size; ++r)
      all = Operation::join(all, __ldcv(reinterpret_cast<const T*>(group.page[r]->stage[parity]) + i));
    values[i] = all;
  }
  if (threadIdx.x == 0) own.completed = number;
}

template <class Operation, class T>
void reduce(const Execution& execution, const PeerGroup& group, T* values, std::int64_t size) {
  const int threads =
      static_cast<int>(std::clamp<std::int64_t>((size + kWarp - 1) / kWarp * kWarp, kWarp, kMostThreads));
  reduce_over_peers<T, Operation><<<1, threads, 0, stream_of(execution)>>>(group, values, size);
  require_launch("a reduction over GPUs");
}

/// Copies words that another GPU may have written, by all threads of a block.
template <class Word>
__device__ void copy_fresh(const std::uint32_t* from, std::uint32_t* to, std::int64_t words) {
  const Word* const source = reinterpret_cast<const Word*>(from);
  Word* const target = reinterpret_cast<Word*>(to);
  const std::int64_t n = words * static_cast<std::int64_t>(sizeof *from) / static_cast<std::int64_t>(sizeof(Word));
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < n; i += blockDim.x) target[i] = __ldcv(source + i);
}

__global__ void __launch_bounds__(kMostThreads)
    gather_from_peers(const __grid_constant__ PeerGroup group, const std::uint32_t* needed, std::uint32_t* all,
                      std::int64_t piece) {
  if (*needed == 0) return;
  constexpr std::int64_t kAtOnce = kPeerStage / sizeof(std::uint32_t);
  PeerPage& own = *group.page[group.rank];
  std::uint32_t number = own.completed;
  const bool wide = piece % 4 == 0 && reinterpret_cast<std::uintptr_t>(all) % sizeof(uint4) == 0;
  for (std::int64_t begin = 0; begin < piece; begin += kAtOnce) {
    const std::uint32_t parity = ++number % 2;
    const std::int64_t words = min(kAtOnce, piece - begin);
    std::uint32_t* const stage = reinterpret_cast<std::uint32_t*>(own.stage[parity]);
    for (std::int64_t i = threadIdx.x; i < words; i += blockDim.x) stage[i] = all[group.rank * piece + begin + i];
    exchange_words(group, &PeerPage::begun, number);
    for (int step = 1; step < group.size; ++step) {
      const int r = (group.rank + step) % group.size;
      const std::uint32_t* const from = reinterpret_cast<const std::uint32_t*>(group.page[r]->stage[parity]);
      std::uint32_t* const to = all + r * piece + begin;
      if (wide)
        copy_fresh<uint4>(from, to, words);
      else
        copy_fresh<std::uint32_t>(from, to, words);
    }
  }
  __syncthreads();  // all threads have read own.completed
  if (threadIdx.x == 0) own.completed = number;
}

static_assert(kMostPeers <= kWarp);

bool in_use = false;  // since the process began; set before any work that overlaps with an exchange

}  // namespace

bool barriers_in_use() { return in_use; }
void use_barriers() { in_use = true; }

void begin_exchange(const Execution& execution, const PeerGroup& group) {
  begin_phase<<<1, kWarp, 0, stream_of(execution)>>>(group);
  require_launch("a barrier of GPUs");
}
void end_exchange(const Execution& execution, const PeerGroup& group) {
  end_phase<<<1, kWarp, 0, stream_of(execution)>>>(group);
  require_launch("a barrier of GPUs");
}

// The type that a GPU loads 64-bit integers as has another name.
void sum(const Execution& execution, const PeerGroup& group, Array<std::int64_t> values) {
  reduce<Sum>(execution, group, reinterpret_cast<long long*>(values.data), values.size);
}
void sum(const Execution& execution, const PeerGroup& group, Array<double> values) {
  reduce<Sum>(execution, group, values.data, values.size);
}
void maximum(const Execution& execution, const PeerGroup& group, Array<std::int32_t> values) {
  reduce<Maximum>(execution, group, values.data, values.size);
}
void all_gather_if(const Execution& execution, const PeerGroup& group, const std::uint32_t* needed,
                   Array<std::uint32_t> all) {
  gather_from_peers<<<1, kMostThreads, 0, stream_of(execution)>>>(group, needed, all.data, all.size / group.size);
  require_launch("a gather over GPUs");
}

}  // namespace weft::kernels::cuda
