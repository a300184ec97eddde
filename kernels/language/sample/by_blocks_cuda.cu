// SPDX-License-Identifier: Apache-2.0
//
// Draws without top_k and top_p, in two kernels. The sums: memory, reading the logits once, which the head has just
// left in the second-level cache. The draw: latency; it reads the sums of a row (393 of 12 bytes for GPT-2) and the
// logits of one block of ids.
#include "kernels/language/rows_cuda.cuh"
#include "kernels/language/sample/larger_cuda.cuh"
#include "kernels/language/sample/sample_rule.hpp"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kDrawWarps = kDrawBlock / kWarp;  ///< a thread per id of a block

struct SumArguments {
  BlockRule rule;
  AnyMatrix logits;
  Matrix<BlockSum> sums;
  bool words;  ///< rows begin at 16-byte words
};

constexpr std::int64_t kMostSumRows = 65535;  ///< of a grid
constexpr int kSumThreads = 256, kIdsOfLane = 8, kLanesOfBlock = kDrawBlock / kIdsOfLane;

/// All lanes of a warp call this: kLanesOfBlock successive lanes have a block. z: the capped logits of a lane,
/// -infinity beyond the vocabulary; largest: of these before the cap. The same on the lanes of a block.
__device__ __forceinline__ BlockSum block_sum(const BlockRule& rule, float largest, const float (&z)[kIdsOfLane]) {
  const auto of_block = [](auto value, const auto& joined) {
#pragma unroll
    for (int mask = kLanesOfBlock / 2; mask > 0; mask /= 2)
      value = joined(value, static_cast<decltype(value)>(__shfl_xor_sync(kAllLanes, value, mask)));
    return value;
  };
  largest = of_block(largest, larger);
  const float capped = capped_logit(largest, rule.softcap);
  const auto sum = [&](float scale) -> std::uint32_t {
    const PowerWeight weight(scale, capped);
    std::uint32_t value = 0;
#pragma unroll
    for (int i = 0; i < kIdsOfLane; ++i) value += weight(z[i]);
    value = of_block(value, [](std::uint32_t x, std::uint32_t y) { return x + y; });
    return largest > -INFINITY ? value : 0;
  };
  BlockSum sums;
  sums.plain = sum(BlockRule::kPlainScale);
  sums.weight = rule.scale == BlockRule::kPlainScale ? sums.plain : sum(rule.scale);
  sums.largest = largest;
  return sums;
}

__global__ void __launch_bounds__(kSumThreads) form_sums(const __grid_constant__ SumArguments a) {
  allow_next_kernel();
  await_previous_kernel();
  const int thread = static_cast<int>(blockIdx.x * kSumThreads + threadIdx.x), first = thread * kIdsOfLane,
            left = static_cast<int>(a.rule.vocabulary) - first;
#pragma unroll 1
  for (std::int64_t row = blockIdx.y; row < a.logits.rows; row += gridDim.y) {
    float z[kIdsOfLane];
    if (a.words && left >= kIdsOfLane) {
      load_columns_again(a.logits, row, first, z);
    } else {
#pragma unroll
      for (int i = 0; i < kIdsOfLane; ++i)
        z[i] = i < left ? load_element(a.logits.data, a.logits.type, row * a.logits.stride + first + i) : -INFINITY;
    }
    float largest = z[0];
#pragma unroll
    for (int i = 1; i < kIdsOfLane; ++i) largest = larger(largest, z[i]);
    if (a.rule.softcap > 0)
#pragma unroll
      for (int i = 0; i < kIdsOfLane; ++i)
        if (i < left) z[i] = capped_logit(z[i], a.rule.softcap);
    const BlockSum sums = block_sum(a.rule, largest, z);
    if (left > 0 && thread % kLanesOfBlock == 0) a.sums(row, thread / kLanesOfBlock) = sums;
  }
}

struct DrawArguments {
  BlockRule rule;
  AnyMatrix logits;
  Matrix<BlockSum> sums;
  GrowingSequences sequences;
};

/// Prefix sums: of the values of lower threads, and of all threads.
template <class Sum>
struct Scan {
  Sum before, total;
};
/// Prefix sums over a block. of_warps: shared memory of this call alone.
template <class Sum>
__device__ __forceinline__ Scan<Sum> scan(Sum value, Sum (&of_warps)[kDrawWarps]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  Sum reached = value;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Sum below = __shfl_up_sync(kAllLanes, reached, offset);
    if (lane >= offset) reached += below;
  }
  if (lane == kWarp - 1) of_warps[warp] = reached;
  __syncthreads();
  Scan<Sum> of{reached - value, 0};
#pragma unroll
  for (int w = 0; w < kDrawWarps; ++w) {
    if (w < warp) of.before += of_warps[w];
    of.total += of_warps[w];
  }
  return of;
}

__global__ void __launch_bounds__(kDrawBlock) draw_by_blocks(const __grid_constant__ DrawArguments a) {
  __shared__ std::uint32_t largest[kDrawWarps];
  __shared__ std::uint64_t sums[2][kDrawWarps];
  __shared__ std::uint32_t in_block[kDrawWarps];
  __shared__ struct {
    std::int32_t block;
    std::uint64_t rest;
  } found;
  allow_next_kernel();
  await_previous_kernel();
  const GrowingSequences& s = a.sequences;
  const std::int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int32_t position = s.positions[row];
  const CachedSequence sequence = s.sequences[row];
  const SampleStream stream = s.streams[row];
  const BlockSum* const of_row = a.sums.row(row);
  const int blocks = static_cast<int>(a.sums.columns), of_thread = (blocks + kDrawBlock - 1) / kDrawBlock,
            first = min(thread * of_thread, blocks), last = min(first + of_thread, blocks);

  const Random4 random = sample_bits(stream, position + 1);
  std::uint32_t most = 0;
#pragma unroll 4
  for (int b = first; b < last; ++b) most = max(most, logit_key(of_row[b].largest));
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, mask));
  if (thread % kWarp == 0) largest[thread / kWarp] = most;
  if (position >= sequence.end) return;  // all threads
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kDrawWarps; ++w) most = max(most, largest[w]);
  const auto finish = [&](const Drawn& drawn) {
    s.drawn(row, position - sequence.prefix) = drawn;
    s.ids[row] = drawn.token;
    s.positions[row] = position + 1;
  };
  const BlockDraw draw(a.rule, most);
  if (!draw.is_finite()) {
    const float nan = __uint_as_float(0x7fc00000u);
    if (thread == 0) finish({0, nan, nan});
    return;
  }

  std::uint64_t weight = 0, plain = 0;
#pragma unroll 1
  for (int b = first; b < last; ++b) {
    weight += draw.weight_of(of_row[b]);
    plain += draw.plain_of(of_row[b]);
  }
  const Scan<std::uint64_t> of_blocks = scan(weight, sums[0]);
  const std::uint64_t all = draw.weighs_plainly() ? of_blocks.total : scan(plain, sums[1]).total;
  const std::uint64_t target = draw.target(random, of_blocks.total);
  if (of_blocks.before <= target && target - of_blocks.before < weight) {
    std::uint64_t rest = target - of_blocks.before;
    int b = first;
    for (std::uint64_t here; (here = draw.weight_of(of_row[b])) <= rest; ++b) rest -= here;
    found = {b, rest};
  }
  __syncthreads();
  const BlockSum block = of_row[found.block];
  const std::int64_t id = std::int64_t{found.block} * kDrawBlock + thread;
  const std::uint32_t rest = draw.target_in(block, random, found.rest);
  float z = 0.0f;
  std::uint32_t here = 0;
  if (id < a.rule.vocabulary) {
    z = load_element(a.logits.data, a.logits.type, row * a.logits.stride + id);
    here = draw.weight_in(block, z);
  }
  const std::uint32_t before = scan(here, in_block).before;
  if (before <= rest && rest - before < here)
    finish(draw.drawn(static_cast<std::uint32_t>(id), z, of_blocks.total, all));
}

}  // namespace

void sum_blocks(const Execution& execution, const BlockRule& rule, AnyMatrix logits, Matrix<BlockSum> sums) {
  if (logits.rows == 0) return;
  const bool words = logits.stride % 8 == 0 && is_aligned(logits.data, 16);
  launch_early<SumArguments>(
      execution, "sample: sums of blocks", form_sums,
      dim3(blocks_for(sums.columns, kSumThreads / kLanesOfBlock), blocks_for(logits.rows, 1, kMostSumRows)),
      kSumThreads, 0, 1, {rule, logits, sums, words});
}

void sample_by_blocks(const Execution& execution, const BlockRule& rule, AnyMatrix logits, Matrix<BlockSum> sums,
                      const GrowingSequences& sequences) {
  if (logits.rows == 0) return;
  launch_early<DrawArguments>(execution, "sample", draw_by_blocks, dim3(static_cast<unsigned>(logits.rows)), kDrawBlock,
                              0, 1, {rule, logits, sums, sequences});
}

}  // namespace weft::kernels::cuda
