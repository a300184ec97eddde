// SPDX-License-Identifier: Apache-2.0
//
// Shared by the portable kernels: one team per row of work (one thread on the host, one warp on a GPU) that walks the
// columns of the row together. Only kernels/*.cpp include this.
//
// A kernel is written once: `for_columns` and the `sum_…` functions are plain vectorised loops on the host and lanes of
// the warp on a GPU. Element c is always handled by the same lane, so element-wise steps need no barrier between them;
// a step that reads what another lane wrote to scratch does (`team_barrier`, which is also all a single host thread
// needs). Every output has one owning team and every sum a fixed order: results do not depend on the number of threads.
//
// To add a hand-written CUDA implementation of a kernel: move the Kokkos one into namespace `portable`, write the other
// in NAME_cuda.cu in namespace `cuda` with the same name and signature, and declare both by WEFT_KERNEL (dispatch.hpp).
// The kernel's test needs no change: for_each_backend (tests/kernels/support.hpp) runs both.
#pragma once

#include <Kokkos_Core.hpp>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

using Space = Kokkos::DefaultExecutionSpace;
using Teams = Kokkos::TeamPolicy<Space, Kokkos::Schedule<Kokkos::Dynamic>>;
using Team = Teams::member_type;

/// Kokkos' execution space on the stream of `execution`. Cached until `forget_spaces`, because creating one allocates.
const Space& space_of(const Execution& execution);
/// Clears the cache of space_of. To be called before Kokkos is finalised.
void forget_spaces();

/// Columns that a team processes at a time: with all data per column they fit the first-level cache. A multiple of the
/// optimizer's block, so that a block never spans two chunks.
constexpr int kChunkColumns = 256;

#if defined(KOKKOS_ENABLE_CUDA)
constexpr int kTeamLanes = 32;
#else
constexpr int kTeamLanes = 1;
#endif

/// On a host both levels of scratch are the same memory, but from Kokkos 5 the first one has at most 32 KiB. A
/// function, since Kokkos takes the level by reference, which device code cannot form of a constant.
constexpr int scratch_level() { return kTeamLanes == 1 ? 1 : 0; }

/// `count` teams (at most 2^31 - 1), each with `scratch_bytes` of scratch.
inline Teams team_policy(const Execution& execution, std::int64_t count, std::size_t scratch_bytes) {
  Teams policy(space_of(execution), static_cast<int>(count), 1, kTeamLanes);
  policy.set_scratch_size(scratch_level(), Kokkos::PerTeam(static_cast<int>(scratch_bytes + 64)));
  return policy;
}

#ifdef KOKKOS_ENABLE_CUDA
/// The execution policy of Kokkos for a body whose captured values are arguments of the kernel. Above 512 bytes Kokkos
/// would copy them to constant memory on a GPU and wait for that copy, which cannot be captured in a graph.
template <class Body, class Policy>
auto as_arguments(const Policy& policy) {
  static_assert(sizeof(Body) <= 3584, "more than the arguments of a kernel can hold (4 KB, with what Kokkos adds)");
  return Kokkos::Experimental::require(policy, Kokkos::Experimental::WorkItemProperty::HintLightWeight);
}
#else
/// On a host Kokkos calls functions, once per team or thread, that know the type of the body: its own templates, which
/// are most of the time of a compilation, are instantiated once instead of once per kernel.
using TeamFunction = void (*)(const void* body, const Team& team);
using RangeFunction = void (*)(const void* body, std::int64_t begin, std::int64_t end);
void run_teams(const Execution& execution, const char* name, std::int64_t count, std::size_t scratch_bytes,
               TeamFunction function, const void* body);
void run_ranges(const Execution& execution, const char* name, std::int64_t count, RangeFunction function,
                const void* body);
#endif

/// Runs body on `count` teams (at most 2^31 - 1), each with `scratch_bytes` of scratch.
template <class Body>
void for_teams(const Execution& execution, const char* name, std::int64_t count, std::size_t scratch_bytes,
               const Body& body) {
  if (count == 0) return;
#ifdef KOKKOS_ENABLE_CUDA
  Kokkos::parallel_for(name, as_arguments<Body>(team_policy(execution, count, scratch_bytes)), body);
#else
  const auto function = [](const void* of_type, const Team& team) { (*static_cast<const Body*>(of_type))(team); };
  run_teams(execution, name, count, scratch_bytes, function, &body);
#endif
}

/// for (i in [0, count)) body(i), in any order.
template <class Body>
void for_all(const Execution& execution, const char* name, std::int64_t count, const Body& body) {
  if (count == 0) return;
#ifdef KOKKOS_ENABLE_CUDA
  const Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>> policy(space_of(execution), 0, count);
  Kokkos::parallel_for(name, as_arguments<Body>(policy), body);
#else
  const auto function = [](const void* of_type, std::int64_t begin, std::int64_t end) {
    const Body& each = *static_cast<const Body*>(of_type);
    for (std::int64_t i = begin; i < end; ++i) each(i);
  };
  run_ranges(execution, name, count, function, &body);
#endif
}

/// Turns counts in data[1 .. n] into offsets: data[i] = base + data[1] + ... + data[i], where data[0] = base on entry.
inline void offsets_from_counts(const Space& space, std::int64_t* data, std::int64_t n) {
  if (n == 0) return;
  Kokkos::parallel_scan(
      "offsets", Kokkos::RangePolicy<Space>(space, 0, n), KOKKOS_LAMBDA(std::int64_t i, std::int64_t & sum, bool last) {
        sum += data[i + 1];
        if (last) data[i + 1] = data[0] + sum;
      });
}

/// The team's scratch as a T (an aggregate of arrays), not initialised.
template <class T>
KOKKOS_FORCEINLINE_FUNCTION T& scratch(const Team& team) {
  return *static_cast<T*>(team.team_scratch(scratch_level()).get_shmem_aligned(sizeof(T), 64));
}

/// body(c) for every c in [0, count).
template <class Body>
KOKKOS_FORCEINLINE_FUNCTION void for_columns(const Team& team, int count, const Body& body) {
#ifdef __CUDA_ARCH__
  Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, count), body);
#else
  static_cast<void>(team);
#pragma GCC ivdep
  for (int c = 0; c < count; ++c) body(c);
#endif
}

/// Sum of term(c) over c in [0, count), the same on every lane. On the host in 16 partial sums that are then halved:
/// the order is part of the source, not of the compiler's choice of vector width.
template <class Value, class Term>
KOKKOS_FORCEINLINE_FUNCTION Value sum_columns(const Team& team, int count, const Term& term) {
#ifdef __CUDA_ARCH__
  Value total = 0;
  Kokkos::parallel_reduce(
      Kokkos::ThreadVectorRange(team, count), [&](int c, Value& sum) { sum += term(c); }, total);
  return total;
#else
  static_cast<void>(team);
  Value lane[16] = {};
  int c = 0;
  for (; c + 16 <= count; c += 16)
#pragma GCC ivdep
    for (int i = 0; i < 16; ++i) lane[i] += term(c + i);
  for (int i = 0; c < count; ++c, ++i) lane[i] += term(c);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
#endif
}

/// Largest of `least` and of value(c) over c in [0, count), the same on every lane. NaN is ignored.
template <class Value>
KOKKOS_FORCEINLINE_FUNCTION float max_columns(const Team& team, int count, float least, const Value& value) {
#ifdef __CUDA_ARCH__
  float largest = least;
  Kokkos::parallel_reduce(
      Kokkos::ThreadVectorRange(team, count),
      [&](int c, float& partial) {
        const float x = value(c);
        partial = x > partial ? x : partial;
      },
      Kokkos::Max<float>(largest));
  return largest > least ? largest : least;
#else
  static_cast<void>(team);
  float lane[16];
  for (int i = 0; i < 16; ++i) lane[i] = least;
  int c = 0;
  for (; c + 16 <= count; c += 16)
    for (int i = 0; i < 16; ++i) {
      const float x = value(c + i);
      lane[i] = x > lane[i] ? x : lane[i];
    }
  for (int i = 0; c < count; ++c, ++i) {
    const float x = value(c);
    lane[i] = x > lane[i] ? x : lane[i];
  }
  for (int i = 1; i < 16; ++i) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
  return lane[0];
#endif
}

/// a * b + c, fused where the processor can: the bits are those of one type of processor.
KOKKOS_FORCEINLINE_FUNCTION float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
/// a * b and a + b, each rounded: a compiler for a GPU may fuse the operators, here and not there.
KOKKOS_FORCEINLINE_FUNCTION float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
KOKKOS_FORCEINLINE_FUNCTION float rounded_sum(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

KOKKOS_FORCEINLINE_FUNCTION int smaller(std::int64_t a, std::int64_t b) { return static_cast<int>(a < b ? a : b); }

/// body(column, count) for every chunk of a row, in order. Chunks do not cross the borders of segments (a divisor of
/// `columns`).
template <class Body>
KOKKOS_FORCEINLINE_FUNCTION void for_chunks(std::int64_t columns, std::int64_t segment, const Body& body) {
  for (std::int64_t begin = 0; begin < columns; begin += segment)
    for (std::int64_t c = 0; c < segment; c += kChunkColumns) body(begin + c, smaller(kChunkColumns, segment - c));
}

/// Columns [column, column + count) of a row as fp32: the row itself if stored as fp32, else widened into `buffer`.
KOKKOS_FORCEINLINE_FUNCTION const float* row_chunk(const Team& team, const AnyMatrix& matrix, std::int64_t row,
                                                   std::int64_t column, int count, float* buffer) {
  const std::int64_t first = row * matrix.stride + column;
  if (matrix.type == Scalar::fp32) return static_cast<const float*>(matrix.data) + first;
  if (matrix.type == Scalar::bf16) {
    const bf16* from = static_cast<const bf16*>(matrix.data) + first;
    for_columns(team, count, [&](int c) { buffer[c] = from[c]; });
  } else {
    const half* from = static_cast<const half*>(matrix.data) + first;
    for_columns(team, count, [&](int c) { buffer[c] = from[c]; });
  }
  return buffer;
}

/// Prefetches the cache lines of the chunk that is read next: rows of a list are scattered, so the hardware prefetcher
/// cannot predict them. No effect on a GPU, where other warps hide the latency.
KOKKOS_FORCEINLINE_FUNCTION void prefetch_chunk(const AnyMatrix& matrix, std::int64_t row, std::int64_t column,
                                                int count) {
#ifdef __CUDA_ARCH__
  static_cast<void>(matrix), static_cast<void>(row), static_cast<void>(column), static_cast<void>(count);
#else
  constexpr std::int64_t kLine = 64;
  const std::int64_t element = matrix.type == Scalar::fp32 ? 4 : 2;
  const char* begin = static_cast<const char*>(matrix.data) + (row * matrix.stride + column) * element;
  for (std::int64_t byte = 0; byte < count * element; byte += kLine) __builtin_prefetch(begin + byte);
#endif
}

/// Stores value(c) as columns [column, column + count) of a row, rounded to nearest where the matrix is bf16 or fp16.
template <class Value>
KOKKOS_FORCEINLINE_FUNCTION void store_chunk(const Team& team, const AnyMatrix& matrix, std::int64_t row,
                                             std::int64_t column, int count, const Value& value) {
  const std::int64_t first = row * matrix.stride + column;
  if (matrix.type == Scalar::fp32) {
    float* to = static_cast<float*>(matrix.data) + first;
    for_columns(team, count, [&](int c) { to[c] = value(c); });
  } else if (matrix.type == Scalar::bf16) {
    bf16* to = static_cast<bf16*>(matrix.data) + first;
    for_columns(team, count, [&](int c) { to[c] = to_bf16(value(c)); });
  } else {
    half* to = static_cast<half*>(matrix.data) + first;
    for_columns(team, count, [&](int c) { to[c] = to_half(value(c)); });
  }
}

/// Runs body once per team, on its first lane.
template <class Body>
KOKKOS_FORCEINLINE_FUNCTION void once(const Team& team, const Body& body) {
  Kokkos::single(Kokkos::PerTeam(team), body);
}

}  // namespace weft::kernels
