// SPDX-License-Identifier: Apache-2.0
//
// Limit: latency of the exchanges between threads; the logits, which the head has just written, come from the
// second-level cache. They are read three times, and eight times more for each of top_k and top_p. Integer sums: the
// order does not matter.
//
// A cluster of blocks shares a row. Each block, and in it each warp, has a contiguous range of ids, so that ties and
// the inversion follow the ids: sums of blocks first, then of warps, of lanes, then one lane walks its range.
#include "kernels/language/rows_cuda.cuh"
#include "kernels/language/sample/rule.hpp"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels {

namespace portable {
decltype(kernels::sample) sample;
}  // namespace portable

namespace cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kMostBlocks = 8;  ///< that share a row
constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;

struct Arguments {
  SampleRule rule;
  AnyMatrix logits;
  GrowingSequences sequences;
  int blocks;  ///< that share a row: 1, 2, 4 or 8
};

/// Exchange between the threads of a row. Every thread of all its blocks calls the functions, in the same order.
struct RowThreads {
  /// Two sets in turn: a block may write its next sums while another still reads the last ones.
  struct Shared {
    std::uint64_t of_warps[2][kWarps * (kDigits - 1)], of_blocks[2][kMostBlocks * (kDigits - 1)];
  };
  Shared& shared;
  int blocks, block, turn = 0;

  /// Joined values over all threads, the same on every thread. value: [kCount]. of_warps and of_blocks then have those
  /// of the warps of this block and of the blocks, kCount each.
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
#pragma unroll
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

/// Where an inversion is: weights and ties before it.
struct Inversion {
  std::uint64_t target, tie_weight, before = 0;
  std::int64_t ties_left;  ///< that may still be drawn

  /// Weight of a range with this weight above the threshold and these ties.
  __device__ __forceinline__ std::uint64_t weight(std::uint64_t above, std::uint64_t equal) const {
    return above + static_cast<std::uint64_t>(taken(equal)) * tie_weight;
  }
  __device__ __forceinline__ std::int64_t taken(std::uint64_t equal) const {
    const auto present = static_cast<std::int64_t>(equal);
    return present < ties_left ? present : ties_left;
  }
  /// The range in which the draw lies, of `count` with (above, equal) each; moves to its beginning.
  __device__ __forceinline__ int find(const std::uint64_t* ranges, int count) {
    for (int i = 0; i < count; ++i) {
      const std::uint64_t here = weight(ranges[2 * i], ranges[2 * i + 1]);
      if (before + here > target) return i;
      before += here;
      ties_left -= taken(ranges[2 * i + 1]);
    }
    return count;
  }
};

/// kWidth: ids that a thread reads at once, 8 or 1. kFilters: top_k or top_p.
template <int kWidth, bool kFilters>
__global__ void __launch_bounds__(kThreads, kFilters ? 1 : 2) draw(const __grid_constant__ Arguments a) {
  __shared__ RowThreads::Shared shared;
  allow_next_kernel();
  meet_cluster();  // all blocks exist: their shared memory may be written
  await_previous_kernel();
  const SampleRule& r = a.rule;
  const GrowingSequences& s = a.sequences;
  const std::int64_t row = static_cast<int>(blockIdx.x) / a.blocks;
  const CachedSequence sequence = s.sequences[row];
  const std::int32_t position = s.positions[row];
  if (position >= sequence.end) return;
  RowThreads threads{shared, a.blocks, static_cast<int>(blockIdx.x) % a.blocks};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int vocabulary = static_cast<int>(r.vocabulary), warps = a.blocks * kWarps,
            span = ((vocabulary + warps - 1) / warps + 7) / 8 * 8;
  const int begin = min((threads.block * kWarps + warp) * span, vocabulary), end = min(begin + span, vocabulary);

  const auto load = [&](int id) { return load_element(a.logits.data, a.logits.type, row * a.logits.stride + id); };
  // body(logit) for the ids of this warp.
  const auto each = [&](auto&& body) {
#pragma unroll 2
    for (int first = begin + lane * kWidth; first < end; first += kWarp * kWidth) {
      float z[kWidth];
      if constexpr (kWidth == 1)
        load_columns(a.logits, row, first, z);
      else
        load_columns_again(a.logits, row, first, z);
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (first + i < end) body(z[i]);
    }
  };

  std::uint64_t largest[1] = {};
  each([&](float z) { largest[0] = max(largest[0], std::uint64_t{logit_key(z)}); });
  threads.join(largest, [](std::uint64_t x, std::uint64_t y) { return max(x, y); });
  const auto most = static_cast<std::uint32_t>(largest[0]);
  if (!is_finite_key(most)) {
    if (threads.block == 0 && thread == 0) {
      const float nan = __uint_as_float(0x7fc00000u);
      s.drawn(row, position - sequence.prefix) = {0, nan, nan};
      s.ids[row] = 0;
      s.positions[row] = position + 1;
    }
    return;
  }
  LogitWeight weight{0.0f, 1.0f / r.temperature, r.softcap};
  weight.largest = weight.capped(logit_of_key(most));
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

  // Without a filter the sum of all weights is formed with the ranges of the inversion.
  std::uint64_t all = kFilters || r.temperature != 1.0f ? sum(plain) : 0,
                total = kFilters && r.temperature != 1.0f ? sum(weight) : all;
  KeptLogits kept;
  if (kFilters && r.top_k > 0) {
    kept.key = threshold(static_cast<std::uint64_t>(r.top_k), 0, [](float) -> std::uint64_t { return 1; });
    const std::uint32_t key = kept.key;
    kept.ties =
        r.top_k - static_cast<std::int64_t>(sum([key](float z) -> std::uint64_t { return logit_key(z) > key; }));
    total = sum([key, weight](float z) -> std::uint64_t { return logit_key(z) > key ? weight(z) : 0; }) +
            static_cast<std::uint64_t>(kept.ties) * weight(logit_of_key(key));
  }
  if (kFilters && r.top_p < 1) {
    const std::uint64_t needed = needed_weight(r.top_p, total);
    const std::uint32_t lowest = kept.key, key = threshold(needed, lowest, weight);
    const std::uint64_t above =
                            sum([key, weight](float z) -> std::uint64_t { return logit_key(z) > key ? weight(z) : 0; }),
                        each_tie = weight(logit_of_key(key));
    const std::int64_t equal =
        r.top_k > 0 && key == lowest
            ? kept.ties
            : static_cast<std::int64_t>(sum([key](float z) -> std::uint64_t { return logit_key(z) == key; }));
    kept = {key, needed_ties(needed, above, each_tie, equal)};
    total = above + static_cast<std::uint64_t>(kept.ties) * each_tie;
  }

  // Inversion. Weights above the threshold and numbers of ties, by block, by warp and by lane.
  Inversion inversion{
      .target = 0, .tie_weight = kept.key == 0 ? 0 : weight(logit_of_key(kept.key)), .ties_left = kept.ties};
  const auto count = [&](float z, std::uint64_t& above, std::uint64_t& equal) {
    const std::uint32_t key = logit_key(z);
    if (key > kept.key) above += weight(z);
    if (key == kept.key) ++equal;
  };
  std::uint64_t sums[2] = {};
  each([&](float z) { count(z, sums[0], sums[1]); });
  threads.sum(sums);
  if (!kFilters) total = sums[0];
  if (!kFilters && r.temperature == 1.0f) all = total;
  inversion.target = drawn_weight(s.streams[row], position + 1, total);
  if (inversion.find(threads.of_blocks(), a.blocks) != threads.block) return;
  if (inversion.find(threads.of_warps(), kWarps) != warp) return;

  const int of_lane = (end - begin + kWarp - 1) / kWarp, lane_begin = min(begin + lane * of_lane, end),
            lane_end = min(lane_begin + of_lane, end);
  std::uint64_t above = 0, equal = 0;
  for (int id = lane_begin; id < lane_end; ++id) count(load(id), above, equal);
  // Sums over this lane and those below it.
  const auto up_to_here = [lane](std::uint64_t value) {
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const std::uint64_t below = __shfl_up_sync(kAllLanes, value, offset);
      if (lane >= offset) value += below;
    }
    return value;
  };
  const auto ties_before = static_cast<std::int64_t>(up_to_here(equal) - equal);
  inversion.ties_left = inversion.ties_left > ties_before ? inversion.ties_left - ties_before : 0;
  const std::uint64_t own = inversion.weight(above, equal), reached = inversion.before + up_to_here(own);
  const unsigned beyond = __ballot_sync(kAllLanes, reached > inversion.target);
  if (lane != __ffs(static_cast<int>(beyond)) - 1) return;
  std::uint64_t before = reached - own;
  for (int id = lane_begin; id < lane_end; ++id) {
    const float z = load(id);
    const std::uint32_t key = logit_key(z);
    if (key < kept.key || (key == kept.key && inversion.ties_left-- <= 0)) continue;
    const std::uint64_t each_weight = weight(z);
    before += each_weight;
    if (before <= inversion.target) continue;
    s.drawn(row, position - sequence.prefix) = {
        static_cast<std::uint32_t>(id),
        static_cast<float>(static_cast<double>(plain.capped(z) - plain.largest) -
                           log(static_cast<double>(all) * 0x1p-40)),
        static_cast<float>(log(static_cast<double>(each_weight) / static_cast<double>(total)))};
    s.ids[row] = static_cast<std::uint32_t>(id);
    s.positions[row] = position + 1;
    return;
  }
}

/// resident: blocks of the kernel that a multiprocessor takes.
void launch(const Execution& execution, Arguments arguments, void (*kernel)(Arguments), int resident) {
  // As many blocks as the GPU takes at once, none without a few words of ids per thread. The draw does not depend on
  // it.
  constexpr std::int64_t kLeastIds = kThreads * 8;
  const std::int64_t rows = arguments.logits.rows;
  while (has_clusters() && arguments.blocks < kMostBlocks &&
         2 * arguments.blocks * rows <= resident * multiprocessors() &&
         2 * arguments.blocks * kLeastIds <= arguments.rule.vocabulary)
    arguments.blocks *= 2;
  launch_early<Arguments>(execution, "sample", kernel, dim3(static_cast<unsigned>(rows * arguments.blocks)), kThreads,
                          0, arguments.blocks, arguments);
}

}  // namespace

void sample(const Execution& execution, const SampleRule& rule, AnyMatrix logits, const GrowingSequences& sequences) {
  if (logits.rows == 0) return;
  const bool words = logits.stride % 8 == 0 && is_aligned(logits.data, 16);
  if (rule.top_k > 0 || rule.top_p < 1)
    launch(execution, {rule, logits, sequences, 1}, words ? draw<8, true> : draw<1, true>, 1);
  else
    launch(execution, {rule, logits, sequences, 1}, words ? draw<8, false> : draw<1, false>, 2);
}

}  // namespace cuda
}  // namespace weft::kernels
