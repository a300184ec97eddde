// SPDX-License-Identifier: Apache-2.0
//
// Barriers and reductions: one block per kernel. A barrier takes about one round trip of a word between GPUs, a few
// microseconds; a reduction reads at most 256 KiB from every peer. Limit: latency.
//
// A stage is reused two exchanges later. By then its readers are done: they entered the exchange in between only after
// they had finished this one, and this rank has waited for them there.
//
// Sums of rows: words are written to the pages of the peers with a mark in each half of eight bytes, which arrives as a
// whole (PTX ISA, memory consistency model: vector accesses are accesses of their elements). A receiver polls its own
// page: one trip, no fence, no flag that follows the data. Two forms, on R ranks, of B bytes:
//
//   at once    each rank sends its rows to all, and forms all sums       2 (R - 1) B bytes sent, one trip
//   in parts   each rank sends part r of its rows to rank r, which       4 (R - 1) / R B bytes sent, two trips
//              forms these sums and sends them to all
//
// For 512 KiB on four GPUs a rank sends 3 or 1.5 MiB, which takes 9 or 4.5 µs at 350 GB/s [estimate].
//
// The receiver sets a word to zero when it has read it. So a mark shows that the word of the present sum has arrived:
// there are no numbers that could repeat. When a word is written, that of an earlier sum has been read and cleared. Let
// m be the number of a sum; a rank completes m only after every rank has begun it, since each word of a sum needs those
// of all ranks. A kernel begins after all blocks of the one before, whose writes are then complete (it waits for that,
// if it has started early).
//   rows[m % 2]: a rank that writes there has completed m - 1. So every rank has begun m - 1, and has ended the kernel
//     of m - 2, which read and cleared the words.
//   sums: a rank that writes there has the rows of the receiver. So that rank has begun m, and has ended the kernel of
//     m - 1, which read and cleared the words.
// A rank that was aborted sends nothing: neither rows, once its guard says so, nor sums of rows that have not arrived.
// Its peers wait until they are aborted themselves.
#include <algorithm>
#include <cstddef>

#include "kernels/launch_cuda.cuh"
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

/// True if an earlier exchange was aborted.
__device__ bool is_halted(const PeerGroup& group) {
  return group.guard != nullptr &&
         static_cast<const volatile StepGuard*>(group.guard)->halted == static_cast<std::int64_t>(kExchangeAborted);
}
/// Host memory is slow to read, so the flag is polled rarely. `turn`: of a loop that waits, from 1.
__device__ bool is_aborted(const PeerGroup& group, unsigned turn) {
  return turn % 4096 == 0 && *static_cast<const volatile int*>(group.aborted) != 0;
}
__device__ void withhold_step(const PeerGroup& group) {
  if (group.guard == nullptr) return;
  group.step->withheld = 1;
  group.guard->halted = kExchangeAborted;
}

/// Barrier of all ranks, called by all threads of the block. words: place in a page of the words of all ranks. Writes
/// before it are visible to the peers' threads after it. After a barrier that was aborted, this rank no longer lets its
/// peers pass: its data are not complete.
__device__ void exchange_words(const PeerGroup& group, std::size_t words, std::uint32_t number) {
  const auto words_of = [&](int rank) {
    return reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::byte*>(group.page[rank]) + words);
  };
  // Read before the fence, which takes longer.
  bool aborted = is_halted(group);
  __threadfence_system();
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r < group.size && r != group.rank) {
    if (!aborted) {
      write_word(words_of(r) + group.rank, number);
      const std::uint32_t* const word = words_of(group.rank) + r;
      // Numbers wrap around.
      for (unsigned turn = 1; !aborted && static_cast<std::int32_t>(read_word(word) - number) < 0; ++turn)
        aborted = is_aborted(group, turn);
    }
    if (aborted) withhold_step(group);
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

constexpr int kRowThreads = 256;
/// Words of the peers that a thread waits for at a time.
constexpr int kRanksAtOnce = 4;

struct RowSum {
  PeerGroup group;
  Scalar type;
  uint2* rows;  ///< [words]
  int words;
  int part;  ///< words of a part, the last ones may have fewer; 0: the sums are formed at once
};

__device__ __forceinline__ void send(MarkedWord* to, uint2 word) {
  constexpr std::uint64_t kMark = std::uint64_t{1} << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(word.x | kMark), "l"(word.y | kMark)
               : "memory");
}
__device__ __forceinline__ MarkedWord read(const MarkedWord* at) {
  MarkedWord word;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(word.half[0]), "=l"(word.half[1])
               : "l"(at)
               : "memory");
  return word;
}

/// Waits for words and clears their places; at[k] = null: word[k] stays. False if the exchange was aborted.
__device__ __forceinline__ bool receive(const PeerGroup& group, MarkedWord* const (&at)[kRanksAtOnce],
                                        uint2 (&word)[kRanksAtOnce]) {
  for (unsigned turn = 1;; ++turn) {
    bool arrived = true;
#pragma unroll
    for (int k = 0; k < kRanksAtOnce; ++k) {
      if (at[k] == nullptr) continue;
      const MarkedWord marked = read(at[k]);
      word[k] = make_uint2(static_cast<std::uint32_t>(marked.half[0]), static_cast<std::uint32_t>(marked.half[1]));
      arrived = arrived && (marked.half[0] & marked.half[1]) >> 32 != 0;
    }
    if (arrived) break;
    if (is_aborted(group, turn)) return false;
  }
#pragma unroll
  for (int k = 0; k < kRanksAtOnce; ++k)
    if (at[k] != nullptr) *reinterpret_cast<uint4*>(at[k]) = make_uint4(0, 0, 0, 0);
  return true;
}

__device__ void unpack(Scalar, uint2 word, float (&value)[2]) {
  value[0] = __uint_as_float(word.x), value[1] = __uint_as_float(word.y);
}
__device__ void unpack(Scalar type, uint2 word, float (&value)[4]) {
  const std::uint32_t pair[2] = {word.x, word.y};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (type == Scalar::bf16) {
      value[2 * i] = low_bf16(pair[i]), value[2 * i + 1] = high_bf16(pair[i]);
    } else {
      value[2 * i] = half{static_cast<std::uint16_t>(pair[i] & 0xffffu)};
      value[2 * i + 1] = half{static_cast<std::uint16_t>(pair[i] >> 16)};
    }
  }
}
__device__ uint2 pack(Scalar, const float (&value)[2]) {
  return make_uint2(__float_as_uint(value[0]), __float_as_uint(value[1]));
}
__device__ uint2 pack(Scalar type, const float (&value)[4]) {
  return type == Scalar::bf16 ? make_uint2(pack2(value[0], value[1]), pack2(value[2], value[3]))
                              : make_uint2(pack2_half(value[0], value[1]), pack2_half(value[2], value[3]));
}

/// The k-th peer, k = 1 … size - 1: each rank begins with another.
__device__ __forceinline__ int peer(const PeerGroup& group, int k) {
  const int r = group.rank + k;
  return r < group.size ? r : r - group.size;
}
/// Which place of a page has the rows that `from` sends to `to`.
__device__ __forceinline__ int place(int from, int to) { return from < to ? from : from - 1; }

/// Adds words of all ranks in rank order. own: that of this rank; received: where those of the others arrive, `stride`
/// words from one rank to the next. False if the exchange was aborted.
template <int kWidth>
__device__ __forceinline__ bool add_arriving(const RowSum& a, uint2 own, MarkedWord* received, int stride,
                                             uint2& total) {
  const PeerGroup& group = a.group;
  float sum[kWidth];
  for (int begin = 0; begin < group.size; begin += kRanksAtOnce) {
    MarkedWord* at[kRanksAtOnce];
    uint2 word[kRanksAtOnce];
#pragma unroll
    for (int k = 0; k < kRanksAtOnce; ++k) {
      const int r = begin + k;
      word[k] = own;
      at[k] = r < group.size && r != group.rank ? received + place(r, group.rank) * stride : nullptr;
    }
    if (!receive(group, at, word)) return false;
#pragma unroll
    for (int k = 0; k < kRanksAtOnce; ++k) {
      if (begin + k >= group.size) continue;
      float value[kWidth];
      unpack(a.type, word[k], value);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] = begin + k == 0 ? value[j] : sum[j] + value[j];
    }
  }
  total = pack(a.type, sum);
  return true;
}

/// The words of a thread are `first`, `first` + `step`, … False if the exchange was aborted.
template <int kWidth>
__device__ __forceinline__ bool sum_at_once(const RowSum& a, std::uint32_t parity, int first, int step, bool sends) {
  const PeerGroup& group = a.group;
  for (int i = first; i < a.words; i += step) {
    const uint2 word = __ldcg(a.rows + i);
    for (int k = 1; k < group.size && sends; ++k) {
      const int to = peer(group, k);
      send(group.page[to]->rows[parity] + place(group.rank, to) * a.words + i, word);
    }
  }
  MarkedWord* const received = group.page[group.rank]->rows[parity];
  for (int i = first; i < a.words && sends; i += step) {
    uint2 total;
    sends = add_arriving<kWidth>(a, __ldcg(a.rows + i), received + i, a.words, total);
    if (sends) a.rows[i] = total;
  }
  return sends;
}

/// The words of a thread are `first`, `first` + `step`, … of each part. False if the exchange was aborted.
template <int kWidth>
__device__ __forceinline__ bool sum_in_parts(const RowSum& a, std::uint32_t parity, int first, int step, bool sends) {
  const PeerGroup& group = a.group;
  const auto in_part = [&](int r, int j) { return r * a.part + j < a.words; };
  for (int j = first; j < a.part && sends; j += step)
    for (int k = 1; k < group.size; ++k) {
      const int to = peer(group, k);
      if (in_part(to, j))
        send(group.page[to]->rows[parity] + place(group.rank, to) * a.part + j, __ldcg(a.rows + to * a.part + j));
    }
  PeerPage& own = *group.page[group.rank];
  for (int j = first; j < a.part && in_part(group.rank, j) && sends; j += step) {
    const int i = group.rank * a.part + j;
    uint2 total;
    sends = add_arriving<kWidth>(a, __ldcg(a.rows + i), own.rows[parity] + j, a.part, total);
    if (!sends) break;
    for (int k = 1; k < group.size; ++k) send(group.page[peer(group, k)]->sums + i, total);
    a.rows[i] = total;
  }
  for (int j = first; j < a.part && sends; j += step)
    for (int begin = 0; begin < group.size && sends; begin += kRanksAtOnce) {
      MarkedWord* at[kRanksAtOnce];
      uint2 word[kRanksAtOnce];
#pragma unroll
      for (int k = 0; k < kRanksAtOnce; ++k) {
        const int r = begin + k;
        at[k] = r < group.size && r != group.rank && in_part(r, j) ? own.sums + r * a.part + j : nullptr;
      }
      sends = receive(group, at, word);
#pragma unroll
      for (int k = 0; k < kRanksAtOnce; ++k)
        if (at[k] != nullptr && sends) a.rows[(begin + k) * a.part + j] = word[k];
    }
  return sends;
}

/// kWidth: elements of a word. Warps of all blocks in turn: few rows are sent by many multiprocessors.
template <int kWidth>
__global__ void __launch_bounds__(kRowThreads) sum_rows_over_peers(const __grid_constant__ RowSum a) {
  await_previous_kernel();
  std::uint32_t& completed = a.group.page[a.group.rank]->row_sums[blockIdx.x];
  const std::uint32_t number = __ldcg(&completed);
  const int thread = static_cast<int>(threadIdx.x), blocks = static_cast<int>(gridDim.x),
            first = (thread / kWarp * blocks + static_cast<int>(blockIdx.x)) * kWarp + thread % kWarp,
            step = blocks * kRowThreads;
  const bool complete = a.part == 0 ? sum_at_once<kWidth>(a, number % 2, first, step, !is_halted(a.group))
                                    : sum_in_parts<kWidth>(a, number % 2, first, step, !is_halted(a.group));
  if (!complete) withhold_step(a.group);
  __syncthreads();  // all threads have read the number
  if (thread == 0) completed = number + 1;
}

static_assert(kMostPeers <= kWarp);
static_assert(offsetof(PeerPage, row_sums) % 256 == 0 && offsetof(PeerPage, stage) % 256 == 0);

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
void sum_rows(const Execution& execution, const PeerGroup& group, AnyMatrix rows, bool at_once) {
  const std::int64_t words = rows.rows * rows.columns * bytes_of(rows.type) / static_cast<std::int64_t>(sizeof(uint2));
  if (words == 0) return;
  const RowSum arguments{.group = group,
                         .type = rows.type,
                         .rows = static_cast<uint2*>(rows.data),
                         .words = static_cast<int>(words),
                         .part = at_once ? 0 : static_cast<int>((words + group.size - 1) / group.size)};
  launch_early<RowSum>(execution, "a sum of rows over GPUs",
                       rows.type == Scalar::fp32 ? sum_rows_over_peers<2> : sum_rows_over_peers<4>, dim3(kRowBlocks),
                       kRowThreads, 0, 1, arguments);
}
void all_gather_if(const Execution& execution, const PeerGroup& group, const std::uint32_t* needed,
                   Array<std::uint32_t> all) {
  gather_from_peers<<<1, kMostThreads, 0, stream_of(execution)>>>(group, needed, all.data, all.size / group.size);
  require_launch("a gather over GPUs");
}

}  // namespace weft::kernels::cuda
