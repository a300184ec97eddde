// SPDX-License-Identifier: Apache-2.0
//
// One block per kernel, but for sums of rows. A barrier takes about one round trip of a word between GPUs, a few
// microseconds; a reduction reads at most 256 KiB from every peer, a sum of rows 512. Limit: latency.
//
// A stage is reused two exchanges later. By then its readers are done: they entered the exchange in between only after
// they had finished this one, and this rank has waited for them there. A block of a sum of rows waits for the same
// block of the peers, which reads the same words; a kernel begins after all blocks of the one before it.
#include <algorithm>
#include <cstddef>

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

/// Barrier of all ranks, called by all threads of the block. words: place in a page of the words of all ranks. Writes
/// before it are visible to the peers' threads after it. After a barrier that was aborted, this rank no longer lets its
/// peers pass: its data are not complete.
__device__ void exchange_words(const PeerGroup& group, std::size_t words, std::uint32_t number) {
  const auto words_of = [&](int rank) {
    return reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::byte*>(group.page[rank]) + words);
  };
  // Read before the fence, which takes longer.
  bool aborted = group.guard != nullptr && static_cast<const volatile StepGuard*>(group.guard)->halted ==
                                               static_cast<std::int64_t>(kExchangeAborted);
  __threadfence_system();
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r < group.size && r != group.rank) {
    if (!aborted) {
      write_word(words_of(r) + group.rank, number);
      const std::uint32_t* const word = words_of(group.rank) + r;
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
  exchange_words(group, offsetof(PeerPage, begun), group.page[group.rank]->completed + 1);
}

__global__ void end_phase(const __grid_constant__ PeerGroup group) {
  PeerPage& own = *group.page[group.rank];
  const std::uint32_t number = own.completed + 1;
  exchange_words(group, offsetof(PeerPage, ended), number);
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
  exchange_words(group, offsetof(PeerPage, begun), number);
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
    exchange_words(group, offsetof(PeerPage, begun), number);
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

constexpr int kRowThreads = 512;
/// Words of the peers that are on their way to a thread at a time.
constexpr int kRanksAtOnce = 4;

__device__ void unpack(Scalar, uint4 word, float (&value)[4]) {
  value[0] = __uint_as_float(word.x), value[1] = __uint_as_float(word.y);
  value[2] = __uint_as_float(word.z), value[3] = __uint_as_float(word.w);
}
__device__ void unpack(Scalar type, uint4 word, float (&value)[8]) { unpack8(type, word, value); }
__device__ uint4 pack(Scalar, const float (&value)[4]) {
  return make_uint4(__float_as_uint(value[0]), __float_as_uint(value[1]), __float_as_uint(value[2]),
                    __float_as_uint(value[3]));
}
__device__ uint4 pack(Scalar type, const float (&value)[8]) { return pack8(type, value); }

/// kWidth: elements of a word.
template <int kWidth>
__global__ void __launch_bounds__(kRowThreads)
    sum_rows_over_peers(const __grid_constant__ PeerGroup group, Scalar type, uint4* rows, std::int64_t words) {
  PeerPage& own = *group.page[group.rank];
  const std::uint32_t number = own.completed + 1, parity = number % 2;
  uint4* const stage = reinterpret_cast<uint4*>(own.rows[parity]);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                     step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = first; i < words; i += step) stage[i] = rows[i];
  exchange_words(group, offsetof(PeerPage, rows_begun) + blockIdx.x * sizeof own.rows_begun[0], number);
  for (std::int64_t i = first; i < words; i += step) {
    float sum[kWidth];
    for (int begin = 0; begin < group.size; begin += kRanksAtOnce) {
      uint4 word[kRanksAtOnce];
#pragma unroll
      for (int k = 0; k < kRanksAtOnce; ++k)
        if (begin + k < group.size)
          word[k] = __ldcv(reinterpret_cast<const uint4*>(group.page[begin + k]->rows[parity]) + i);
#pragma unroll
      for (int k = 0; k < kRanksAtOnce; ++k) {
        if (begin + k >= group.size) continue;
        float value[kWidth];
        unpack(type, word[k], value);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] = begin + k == 0 ? value[j] : sum[j] + value[j];
      }
    }
    rows[i] = pack(type, sum);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  // All blocks have read own.completed when the last one is here.
  __threadfence();
  if (atomicAdd(&own.blocks_done, 1u) + 1 != gridDim.x) return;
  own.blocks_done = 0;
  own.completed = number;
}

static_assert(kMostPeers <= kWarp);
static_assert(offsetof(PeerPage, rows_begun) % 256 == 0 && offsetof(PeerPage, stage) % 256 == 0);

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
void sum_rows(const Execution& execution, const PeerGroup& group, AnyMatrix rows) {
  const std::int64_t words = rows.rows * rows.columns * bytes_of(rows.type) / static_cast<std::int64_t>(sizeof(uint4));
  if (words == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(kRowBlocks, blocks_for(words, kRowThreads)));
  uint4* const data = static_cast<uint4*>(rows.data);
  if (rows.type == Scalar::fp32)
    sum_rows_over_peers<4><<<blocks, kRowThreads, 0, stream_of(execution)>>>(group, rows.type, data, words);
  else
    sum_rows_over_peers<8><<<blocks, kRowThreads, 0, stream_of(execution)>>>(group, rows.type, data, words);
  require_launch("a sum of rows over GPUs");
}
void all_gather_if(const Execution& execution, const PeerGroup& group, const std::uint32_t* needed,
                   Array<std::uint32_t> all) {
  gather_from_peers<<<1, kMostThreads, 0, stream_of(execution)>>>(group, needed, all.data, all.size / group.size);
  require_launch("a gather over GPUs");
}

}  // namespace weft::kernels::cuda
