// SPDX-License-Identifier: Apache-2.0
//
// One block each: meeting takes about as long as it takes a word to reach the other GPU and its answer to come back, a
// few microseconds; a reduction reads at most 256 KiB of every peer. Limit: latency.
//
// A stage is written anew two meetings later. By then its readers are done: they came to the meeting between only after
// they had finished this one, and this rank has seen them come.
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

/// By all threads of the block: what they have written before is seen by the peers' threads after it.
__device__ void exchange_words(const Meetings& meetings, std::uint32_t (PeerPage::*words)[kMostPeers],
                               std::uint32_t number) {
  __threadfence_system();
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r < meetings.size && r != meetings.rank) {
    write_word(&(meetings.page[r]->*words)[meetings.rank], number);
    const std::uint32_t* const word = &(meetings.page[meetings.rank]->*words)[r];
    // Numbers wrap around. Memory of the host is far away: it is looked at now and then.
    for (unsigned turn = 1; static_cast<std::int32_t>(read_word(word) - number) < 0; ++turn)
      if (turn % 4096 == 0 && *static_cast<const volatile int*>(meetings.given_up) != 0) break;
  }
  __syncthreads();
}

__global__ void meet_peers(const __grid_constant__ Meetings meetings) {
  exchange_words(meetings, &PeerPage::come, meetings.page[meetings.rank]->number + 1);
}

__global__ void part_from_peers(const __grid_constant__ Meetings meetings) {
  PeerPage& own = *meetings.page[meetings.rank];
  const std::uint32_t number = own.number + 1;
  exchange_words(meetings, &PeerPage::finished, number);
  if (threadIdx.x == 0) own.number = number;
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
__global__ void reduce_over_peers(const __grid_constant__ Meetings meetings, T* values, std::int64_t size) {
  PeerPage& own = *meetings.page[meetings.rank];
  const std::uint32_t number = own.number + 1, parity = number % 2;
  T* const stage = reinterpret_cast<T*>(own.stage[parity]);
  for (std::int64_t i = threadIdx.x; i < size; i += blockDim.x) stage[i] = values[i];
  exchange_words(meetings, &PeerPage::come, number);
  for (std::int64_t i = threadIdx.x; i < size; i += blockDim.x) {
    T all = __ldcv(reinterpret_cast<const T*>(meetings.page[0]->stage[parity]) + i);
#pragma unroll 4
    for (int r = 1; r < meetings.size; ++r)
      all = Operation::join(all, __ldcv(reinterpret_cast<const T*>(meetings.page[r]->stage[parity]) + i));
    values[i] = all;
  }
  if (threadIdx.x == 0) own.number = number;
}

template <class Operation, class T>
void reduce(const Execution& execution, const Meetings& meetings, T* values, std::int64_t size) {
  const int threads =
      static_cast<int>(std::clamp<std::int64_t>((size + kWarp - 1) / kWarp * kWarp, kWarp, kMostThreads));
  reduce_over_peers<T, Operation><<<1, threads, 0, stream_of(execution)>>>(meetings, values, size);
  require_launch("a reduction over GPUs");
}

static_assert(kMostPeers <= kWarp);

}  // namespace

void meet(const Execution& execution, const Meetings& meetings) {
  meet_peers<<<1, kWarp, 0, stream_of(execution)>>>(meetings);
  require_launch("a meeting of GPUs");
}
void part(const Execution& execution, const Meetings& meetings) {
  part_from_peers<<<1, kWarp, 0, stream_of(execution)>>>(meetings);
  require_launch("a meeting of GPUs");
}

// The type that a GPU loads 64-bit integers as has another name.
void sum(const Execution& execution, const Meetings& meetings, Array<std::int64_t> values) {
  reduce<Sum>(execution, meetings, reinterpret_cast<long long*>(values.data), values.size);
}
void sum(const Execution& execution, const Meetings& meetings, Array<double> values) {
  reduce<Sum>(execution, meetings, values.data, values.size);
}
void maximum(const Execution& execution, const Meetings& meetings, Array<std::int32_t> values) {
  reduce<Maximum>(execution, meetings, values.data, values.size);
}

}  // namespace weft::kernels::cuda
