// SPDX-License-Identifier: Apache-2.0
//
// Limit: the second-level cache, which holds the logits that the head has just written; one block per row reads them
// three times, and eight times more for each of top_k and top_p. Integer sums: the order does not matter.
//
// Each warp has a contiguous range of ids, so that ties and the inversion follow the ids: sums of ranges first, then
// one warp walks the range in which the draw lies.
#include "kernels/language/sample/rule.hpp"
#include "kernels/matrix_cuda.cuh"

namespace weft::kernels {

namespace portable {
decltype(kernels::sample) sample;
}  // namespace portable

namespace cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / kWarp;
constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;

struct Arguments {
  SampleRule rule;
  AnyMatrix logits;
  GrowingSequences sequences;
};

/// Sums over the block, the same on every thread. `part` [kWarps, kCount].
template <int kCount>
__device__ __forceinline__ void block_sums(std::uint64_t (&value)[kCount], std::uint64_t* part) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) value[i] = warp_sum(value[i]);
  __syncthreads();  // the sums before may still be read
  if (thread % kWarp == 0)
#pragma unroll
    for (int i = 0; i < kCount; ++i) part[thread / kWarp * kCount + i] = value[i];
  __syncthreads();
  // Lane w takes the sum of warp w.
#pragma unroll
  for (int i = 0; i < kCount; ++i) value[i] = warp_sum(part[thread % kWarp * kCount + i]);
}
static_assert(kWarps == kWarp);

__global__ void __launch_bounds__(kThreads) draw(const __grid_constant__ Arguments a) {
  const SampleRule& r = a.rule;
  const GrowingSequences& s = a.sequences;
  const std::int64_t row = blockIdx.x;
  const CachedSequence sequence = s.sequences[row];
  const std::int32_t position = s.positions[row];
  if (position >= sequence.end) return;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int vocabulary = static_cast<int>(r.vocabulary), span = (vocabulary + kThreads - 1) / kThreads * kWarp;
  const int begin = warp * span, end = min(begin + span, vocabulary);
  __shared__ std::uint64_t part[kWarps * (kDigits - 1)];

  const auto load = [&](int id) { return load_element(a.logits.data, a.logits.type, row * a.logits.stride + id); };
  // body(logit, id) for the ids of this warp.
  const auto each = [&](auto&& body) {
#pragma unroll 4
    for (int id = begin + lane; id < end; id += kWarp) body(load(id), id);
  };

  std::uint32_t most = 0;
  each([&](float z, int) { most = max(most, logit_key(z)); });
  most = warp_largest(most);
  std::uint32_t* const largest = reinterpret_cast<std::uint32_t*>(part);
  if (lane == 0) largest[warp] = most;
  __syncthreads();
  most = warp_largest(largest[lane]);
  if (!is_finite_key(most)) {
    if (thread == 0) {
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
    each([&](float z, int) { value[0] += term(z); });
    block_sums(value, part);
    return value[0];
  };
  // The largest key from which on the sum of `measure` reaches `needed`; keys up to `lowest` do in any case.
  const auto threshold = [&](std::uint64_t needed, std::uint32_t lowest, auto&& measure) {
    std::uint32_t key = 0;
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
      std::uint64_t from[kDigits - 1] = {};
      each([&](float z, int) {
        const std::uint32_t own = logit_key(z);
        if (own < key) return;
        const std::uint64_t value = measure(z);
#pragma unroll
        for (int digit = 1; digit < kDigits; ++digit)
          if (own >= (key | static_cast<std::uint32_t>(digit) << shift)) from[digit - 1] += value;
      });
      block_sums(from, part);
      std::uint32_t chosen = 0;
#pragma unroll
      for (int digit = 1; digit < kDigits; ++digit)
        if (from[digit - 1] >= needed || (key | static_cast<std::uint32_t>(digit) << shift) <= lowest)
          chosen = static_cast<std::uint32_t>(digit);
      key |= chosen << shift;
    }
    return key;
  };

  const std::uint64_t all = sum(plain);
  std::uint64_t total = r.temperature == 1.0f ? all : sum(weight);
  KeptLogits kept;
  if (r.top_k > 0) {
    kept.key = threshold(static_cast<std::uint64_t>(r.top_k), 0, [](float) -> std::uint64_t { return 1; });
    const std::uint32_t key = kept.key;
    kept.ties =
        r.top_k - static_cast<std::int64_t>(sum([key](float z) -> std::uint64_t { return logit_key(z) > key; }));
    total = sum([key, weight](float z) -> std::uint64_t { return logit_key(z) > key ? weight(z) : 0; }) +
            static_cast<std::uint64_t>(kept.ties) * weight(logit_of_key(key));
  }
  if (r.top_p < 1) {
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

  // Inversion. Weights above the threshold and numbers of ties, by warp.
  const std::uint64_t tie_weight = kept.key == 0 ? 0 : weight(logit_of_key(kept.key));
  std::uint64_t above = 0, equal = 0;
  each([&](float z, int) {
    const std::uint32_t key = logit_key(z);
    if (key > kept.key) above += weight(z);
    if (key == kept.key) ++equal;
  });
  above = warp_sum(above);
  equal = warp_sum(equal);
  __syncthreads();
  if (lane == 0) part[2 * warp] = above, part[2 * warp + 1] = equal;
  __syncthreads();
  const std::uint64_t target = drawn_weight(s.streams[row], position + 1, total);
  std::uint64_t before = 0;
  std::int64_t ties = 0;
  int owner = 0;
  for (; owner < kWarps; ++owner) {
    const std::int64_t left = kept.ties - ties, present = static_cast<std::int64_t>(part[2 * owner + 1]),
                       taken = present < left ? present : left;
    const std::uint64_t here = part[2 * owner] + static_cast<std::uint64_t>(taken) * tie_weight;
    if (before + here > target) break;
    before += here;
    ties += taken;
  }
  if (warp != owner) return;
  for (int first = begin; first < end; first += kWarp) {
    const int id = first + lane;
    const float z = id < end ? load(id) : 0.0f;
    const std::uint32_t key = id < end ? logit_key(z) : 0;
    const bool tie = id < end && key == kept.key;
    const unsigned tied = __ballot_sync(kAllLanes, tie);
    const std::int64_t rank = ties + __popc(tied & ((1u << lane) - 1));
    const std::uint64_t own = id < end && (key > kept.key || (tie && rank < kept.ties)) ? weight(z) : 0;
    std::uint64_t sum_here = own;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const std::uint64_t below = __shfl_up_sync(kAllLanes, sum_here, offset);
      if (lane >= offset) sum_here += below;
    }
    const unsigned beyond = __ballot_sync(kAllLanes, before + sum_here > target);
    if (beyond != 0) {
      if (lane != __ffs(static_cast<int>(beyond)) - 1) return;
      s.drawn(row, position - sequence.prefix) = {
          static_cast<std::uint32_t>(id),
          static_cast<float>(static_cast<double>(plain.capped(z) - plain.largest) -
                             log(static_cast<double>(all) * 0x1p-40)),
          static_cast<float>(log(static_cast<double>(own) / static_cast<double>(total)))};
      s.ids[row] = static_cast<std::uint32_t>(id);
      s.positions[row] = position + 1;
      return;
    }
    before += __shfl_sync(kAllLanes, sum_here, kWarp - 1);
    ties += __popc(tied);
  }
}

}  // namespace

void sample(const Execution& execution, const SampleRule& rule, AnyMatrix logits, const GrowingSequences& sequences) {
  if (logits.rows == 0) return;
  draw<<<static_cast<unsigned>(logits.rows), kThreads, 0, stream_of(execution)>>>({rule, logits, sequences});
  require_launch("sample");
}

}  // namespace cuda
}  // namespace weft::kernels
