// SPDX-License-Identifier: Apache-2.0
//
// Draws with top_k or top_p. Limit: latency of the communication between threads; the logits, which the head has just
// written, come from the second-level cache. Integer sums: the order does not matter.
//
// A cluster of blocks shares a row. Each block, and in it each warp, has a contiguous range of ids, so that ties and
// the inversion follow the ids: sums of blocks first, then of warps, of groups of ids and of lanes. Each warp keeps its
// logits in shared memory, where all passes read them (two, and eight for each of top_k and top_p). Where they do not
// fit, each pass reads them from global memory.
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/language/rows_cuda.cuh"
#include "kernels/language/sample/larger_cuda.cuh"
#include "kernels/language/sample/sample_rule.hpp"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kMostBlocks = 8;  ///< that share a row
constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;
constexpr std::int64_t kMostHeld = 80 * 1024;  ///< bytes of logits in shared memory

extern __shared__ __align__(16) unsigned char held_logits[];

struct Arguments {
  SampleRule rule;
  AnyMatrix logits;
  GrowingSequences sequences;
  int blocks;                             ///< that share a row: 1, 2, 4 or 8
  bool held;                              ///< in shared memory
  const std::int32_t* targets = nullptr;  ///< [rows]: mask the others (mask_others); null: draw

  /// Number of ids of a warp.
  __host__ __device__ int span() const {
    const int warps = blocks * kWarps;
    return ((static_cast<int>(rule.vocabulary) + warps - 1) / warps + 7) / 8 * 8;
  }
};

/// Communication between the threads of a row. Every thread of all its blocks calls the functions, in the same order.
struct RowThreads {
  /// Two sets in turn: a block may write its next sums while another still reads the last ones.
  struct Shared {
    std::uint64_t of_warps[2][kWarps * (kDigits - 1)], of_blocks[2][kMostBlocks * (kDigits - 1)];
  };
  Shared& shared;
  int blocks, block, turn = 0;

  /// Reduces values over all threads, with the same result on every thread. value: [kCount]. of_warps and of_blocks
  /// then have those of the warps of this block and of the blocks, kCount each.
  template <int kCount, class Join>
  __device__ __forceinline__ void join(std::uint64_t (&value)[kCount], const Join& joined) {
    const int thread = static_cast<int>(threadIdx.x);
    turn ^= 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2)
        value[i] = joined(value[i], static_cast<std::uint64_t>(__shfl_xor_sync(kAllLanes, value[i], offset)));
    if (thread % kWarp == 0)
#pragma unroll
      for (int i = 0; i < kCount; ++i) of_warps()[thread / kWarp * kCount + i] = value[i];
    __syncthreads();
    if (thread < kCount) {
      std::uint64_t all = of_warps()[thread];
#pragma unroll 4
      for (int warp = 1; warp < kWarps; ++warp) all = joined(all, of_warps()[warp * kCount + thread]);
      for (int to = 0; to < blocks; ++to) *in_cluster(of_blocks() + block * kCount + thread, to) = all;
    }
    sync_cluster();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      value[i] = of_blocks()[i];
      for (int from = 1; from < blocks; ++from) value[i] = joined(value[i], of_blocks()[from * kCount + i]);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void sum(std::uint64_t (&value)[kCount]) {
    join(value, [](std::uint64_t a, std::uint64_t b) { return a + b; });
  }
  __device__ __forceinline__ std::uint64_t* of_warps() const { return shared.of_warps[turn]; }
  __device__ __forceinline__ std::uint64_t* of_blocks() const { return shared.of_blocks[turn]; }
};

/// State of an inversion: weights and ties before its position.
struct Inversion {
  std::uint64_t target, tie_weight, before = 0;
  std::int64_t ties_left;  ///< that may still be drawn

  /// Weight of a range with this weight above the limit and these ties.
  __device__ __forceinline__ std::uint64_t weight(std::uint64_t above, std::uint64_t equal) const {
    return above + static_cast<std::uint64_t>(taken(equal)) * tie_weight;
  }
  __device__ __forceinline__ std::int64_t taken(std::uint64_t equal) const {
    const auto present = static_cast<std::int64_t>(equal);
    return present < ties_left ? present : ties_left;
  }
  /// The range in which the draw lies, of `count` with (above, equal) each; moves to its beginning.
  __device__ __forceinline__ int find(const std::uint64_t* ranges, int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const std::uint64_t here = weight(ranges[2 * i], ranges[2 * i + 1]);
      if (before + here > target) return i;
      before += here;
      ties_left -= taken(ranges[2 * i + 1]);
    }
    return count;
  }
};

/// kWidth: ids that a thread reads at once, 8 or 1. kCaps: soft cap.
///
/// The kernel runs once per step, when its code is no longer in a cache: loops that are not unrolled are faster here.
template <int kWidth, bool kCaps>
__global__ void __launch_bounds__(kThreads) draw(const __grid_constant__ Arguments a) {
  __shared__ RowThreads::Shared shared;
  allow_next_kernel();
  meet_cluster();  // all blocks exist: their shared memory may be written
  await_previous_kernel();
  const SampleRule& r = a.rule;
  const GrowingSequences& s = a.sequences;
  const std::int64_t row = static_cast<int>(blockIdx.x) / a.blocks;
  const bool masks = a.targets != nullptr;
  if (masks && a.targets[row] == kIgnored) return;  // all blocks of the row
  const CachedSequence sequence = masks ? CachedSequence{} : s.sequences[row];
  const std::int32_t position = masks ? 0 : s.positions[row];
  RowThreads threads{shared, a.blocks, static_cast<int>(blockIdx.x) % a.blocks};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int vocabulary = static_cast<int>(r.vocabulary), span = a.span();
  const int begin = min((threads.block * kWarps + warp) * span, vocabulary), end = min(begin + span, vocabulary);

  constexpr int bytes = 2;  // of a logit
  AnyMatrix own{static_cast<char*>(a.logits.data) + (row * a.logits.stride + begin) * bytes, a.logits.type, 1, span,
                span};
  if (a.held) {
    const char* const from = static_cast<const char*>(own.data);
    own.data = held_logits + std::int64_t{warp} * span * bytes;
    const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(own.data));
#pragma unroll 1
    for (int at = 16 * lane; at < (end - begin) * bytes; at += 16 * kWarp)
      copy16_async(to + static_cast<std::uint32_t>(at), from + at);
    commit_copies();
  }
  const Random4 random = masks ? Random4{} : sample_bits(s.streams[row], position + 1);
  wait_copies<0>();
  __syncwarp();
  const auto load = [&](int column, float(&z)[kWidth]) {
    if constexpr (kWidth == 1)
      load_columns(own, 0, column, z);
    else
      load_columns_again(own, 0, column, z);
    if (begin + column + kWidth > end)
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (begin + column + i >= end) z[i] = -INFINITY;
  };
  const auto cap = [&](float z) { return kCaps ? r.softcap * hyperbolic_tangent(z / r.softcap) : z; };
  // body(logit) for the ids of this warp; -infinity, of weight 0, for the rest of the last group, unless it is capped.
  const auto each = [&](auto&& body) {
#pragma unroll 1
    for (int first = lane * kWidth; first < end - begin; first += kWarp * kWidth) {
      float z[kWidth];
      load(first, z);
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (!kCaps || first + i < end - begin) body(z[i]);
    }
  };

  float most_here = -INFINITY;
  each([&](float z) { most_here = larger(most_here, z); });
  std::uint64_t largest[1] = {logit_key(most_here)};
  if (!masks && position >= sequence.end) return;
  threads.join(largest, [](std::uint64_t x, std::uint64_t y) { return max(x, y); });
  const auto most = static_cast<std::uint32_t>(largest[0]);
  if (!is_finite_key(most)) {
    if (!masks && threads.block == 0 && thread == 0) {
      const float nan = __uint_as_float(0x7fc00000u);
      s.drawn(row, position - sequence.prefix) = {0, nan, nan};
      s.ids[row] = 0;
      s.positions[row] = position + 1;
    }
    return;
  }
  LogitWeight weight{0.0f, 1.0f / r.temperature, r.softcap};
  weight.largest = cap(logit_of_key(most));
  LogitWeight plain = weight;
  plain.inverse_temperature = 1.0f;

  const auto sum = [&](auto&& term) {
    std::uint64_t value[1] = {};
    each([&](float z) { value[0] += term(z); });
    threads.sum(value);
    return value[0];
  };
  // The largest key from which on the sum of `measure` reaches `needed`; keys up to `lowest` do in any case.
  const auto threshold = [&](std::uint64_t needed, std::uint32_t lowest, auto&& measure) {
    std::uint32_t key = 0;
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
      std::uint64_t from[kDigits - 1] = {};
      each([&](float z) {
        const std::uint32_t own = logit_key(z);
        if (own < key) return;
        const std::uint64_t value = measure(z);
#pragma unroll
        for (int digit = 1; digit < kDigits; ++digit)
          if (own >= (key | static_cast<std::uint32_t>(digit) << shift)) from[digit - 1] += value;
      });
      threads.sum(from);
      std::uint32_t chosen = 0;
#pragma unroll
      for (int digit = 1; digit < kDigits; ++digit)
        if (from[digit - 1] >= needed || (key | static_cast<std::uint32_t>(digit) << shift) <= lowest)
          chosen = static_cast<std::uint32_t>(digit);
      key |= chosen << shift;
    }
    return key;
  };

  const auto weight_above = [&](std::uint32_t key) {
    return sum([&](float z) -> std::uint64_t { return logit_key(z) > key ? weight.of_capped(cap(z)) : 0; });
  };
  const auto weight_of_key = [&](std::uint32_t key) { return weight.of_capped(cap(logit_of_key(key))); };
  const std::uint64_t all = sum([&](float z) { return plain.of_capped(cap(z)); });
  std::uint64_t total = r.temperature == 1.0f ? all : sum([&](float z) { return weight.of_capped(cap(z)); });
  KeptLogits kept;
  if (r.top_k > 0) {
    kept.key = threshold(static_cast<std::uint64_t>(r.top_k), 0, [](float) -> std::uint64_t { return 1; });
    const std::uint32_t key = kept.key;
    kept.ties = r.top_k -
                static_cast<std::int64_t>(sum([key](float z) -> std::uint64_t { return logit_key(z) > key ? 1 : 0; }));
    total = weight_above(key) + static_cast<std::uint64_t>(kept.ties) * weight_of_key(key);
  }
  if (r.top_p < 1) {
    const std::uint64_t needed = needed_weight(r.top_p, total);
    const std::uint32_t lowest = kept.key,
                        key = threshold(needed, lowest, [&](float z) { return weight.of_capped(cap(z)); });
    const std::uint64_t above = weight_above(key), each_tie = weight_of_key(key);
    const std::int64_t equal =
        r.top_k > 0 && key == lowest
            ? kept.ties
            : static_cast<std::int64_t>(sum([key](float z) -> std::uint64_t { return logit_key(z) == key ? 1 : 0; }));
    kept = {key, needed_ties(needed, above, each_tie, equal)};
    total = above + static_cast<std::uint64_t>(kept.ties) * each_tie;
  }

  // Inversion. Weights above the limit and numbers of ties, by block, by warp and by lane.
  Inversion inversion{.target = 0, .tie_weight = kept.key == 0 ? 0 : weight_of_key(kept.key), .ties_left = kept.ties};
  const auto count = [&](float z, std::uint64_t& above, std::uint64_t& equal) {
    const std::uint32_t key = logit_key(z);
    if (key > kept.key) above += weight.of_capped(cap(z));
    if (key == kept.key) ++equal;
  };
  std::uint64_t sums[2] = {};
  each([&](float z) { count(z, sums[0], sums[1]); });
  threads.sum(sums);
  // Sums over this lane and those below it.
  const auto up_to_here = [lane](std::uint64_t value) {
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const std::uint64_t below = __shfl_up_sync(kAllLanes, value, offset);
      if (lane >= offset) value += below;
    }
    return value;
  };
  if (masks) {
    // Ties before the first id of this warp, then of each lane: by id as in the inversion.
    for (int i = 0; i < threads.block; ++i) inversion.ties_left -= inversion.taken(threads.of_blocks()[2 * i + 1]);
    for (int i = 0; i < warp; ++i) inversion.ties_left -= inversion.taken(threads.of_warps()[2 * i + 1]);
    const int target = a.targets[row] - begin;
    const std::int64_t from = row * a.logits.stride + begin;
    for (int group = 0; group < end - begin; group += kWarp * kWidth) {
      const int first = group + lane * kWidth, last = min(first + kWidth, end - begin);
      std::uint64_t equal = 0;
      for (int i = first; i < last; ++i)
        if (logit_key(load_element(own.data, own.type, i)) == kept.key) ++equal;
      const std::uint64_t ties = up_to_here(equal);
      std::int64_t left = inversion.ties_left - inversion.taken(ties - equal);
      for (int i = first; i < last; ++i) {
        const std::uint32_t key = logit_key(load_element(own.data, own.type, i));
        if (key > kept.key || (key == kept.key && left-- > 0) || i == target) continue;
        store_element(a.logits.data, a.logits.type, from + i, -INFINITY);
      }
      inversion.ties_left -= inversion.taken(__shfl_sync(kAllLanes, ties, kWarp - 1));
    }
    return;
  }
  inversion.target = uniform_below(random, total);
  if (inversion.find(threads.of_blocks(), a.blocks) != threads.block) return;
  if (inversion.find(threads.of_warps(), kWarps) != warp) return;

  for (int group = 0; group < end - begin; group += kWarp * kWidth) {
    const int first = group + lane * kWidth;
    const int last = min(first + kWidth, end - begin);
    std::uint64_t above = 0, equal = 0;
#pragma unroll 1
    for (int i = first; i < last; ++i) count(load_element(own.data, own.type, i), above, equal);
    // The state at the first id of this lane, and what its ids add to it.
    Inversion here = inversion;
    const std::uint64_t ties = up_to_here(equal);
    here.ties_left -= here.taken(ties - equal);
    const std::uint64_t weight_here = here.weight(above, equal), reached = up_to_here(weight_here);
    const bool beyond = inversion.before + reached > inversion.target;
    const unsigned lanes_beyond = __ballot_sync(kAllLanes, beyond);
    if (lanes_beyond == 0) {
      inversion.before += __shfl_sync(kAllLanes, reached, kWarp - 1);
      inversion.ties_left -= inversion.taken(__shfl_sync(kAllLanes, ties, kWarp - 1));
      continue;
    }
    if (lane != __ffs(static_cast<int>(lanes_beyond)) - 1) return;
    here.before += reached - weight_here;
#pragma unroll 1
    for (int i = first; i < last; ++i) {
      const float z = load_element(own.data, own.type, i);
      const std::uint32_t key = logit_key(z);
      if (key < kept.key || (key == kept.key && here.ties_left-- <= 0)) continue;
      const std::uint64_t each_weight = weight.of_capped(cap(z));
      here.before += each_weight;
      if (here.before <= here.target) continue;
      const auto id = static_cast<std::uint32_t>(begin + i);
      s.drawn(row, position - sequence.prefix) = {id, cap(z) - plain.largest - logf(static_cast<float>(all) * 0x1p-40f),
                                                  logf(static_cast<float>(each_weight) / static_cast<float>(total))};
      s.ids[row] = id;
      s.positions[row] = position + 1;
      return;
    }
  }
}

template <bool kCaps>
void launch(const Execution& execution, Arguments arguments) {
  const bool words = arguments.logits.stride % 8 == 0 && is_aligned(arguments.logits.data, 16);
  const auto kernel = words ? draw<8, kCaps> : draw<1, kCaps>;
  // The grid has as many blocks as the GPU runs at once, each with a few words of ids per thread. The draw does not
  // depend on it.
  constexpr std::int64_t kLeastIds = kThreads * 8;
  const std::int64_t rows = arguments.logits.rows;
  while (has_clusters() && arguments.blocks < kMostBlocks && 2 * arguments.blocks * rows <= multiprocessors() &&
         2 * arguments.blocks * kLeastIds <= arguments.rule.vocabulary)
    arguments.blocks *= 2;
  const std::int64_t bytes = std::int64_t{kWarps} * arguments.span() * bytes_of(arguments.logits.type);
  arguments.held = words && bytes <= kMostHeld;
  launch_early<Arguments>(execution, "sample", kernel, dim3(static_cast<unsigned>(rows * arguments.blocks)), kThreads,
                          arguments.held ? bytes : 0, arguments.blocks, arguments);
}

void launch(const Execution& execution, const Arguments& arguments) {
  if (arguments.rule.softcap > 0)
    launch<true>(execution, arguments);
  else
    launch<false>(execution, arguments);
}

}  // namespace

void sample_kept(const Execution& execution, const SampleRule& rule, AnyMatrix logits,
                 const GrowingSequences& sequences) {
  if (logits.rows == 0) return;
  if (logits.type == Scalar::fp32) return portable::sample_kept(execution, rule, logits, sequences);
  launch(execution, {rule, logits, sequences, 1, false});
}

void mask_others(const Execution& execution, const SampleRule& rule, AnyMatrix logits,
                 Array<const std::int32_t> targets) {
  if (logits.rows == 0) return;
  if (logits.type == Scalar::fp32) return portable::mask_others(execution, rule, logits, targets);
  launch(execution, {rule, logits, {}, 1, false, targets.data});
}

}  // namespace weft::kernels::cuda
