// SPDX-License-Identifier: Apache-2.0
//
// Limit: the latency of one launch. A prompt of 10 answers with 384 columns is 15 KB, read once from memory and three
// times more from the first-level cache; one block per prompt. Column sums have a thread per column, sums over the
// columns a warp per answer, in a fixed order.
#include "kernels/language/diversity/set_advantages.hpp"
#include "kernels/matrix_cuda.cuh"

namespace weft::kernels {

namespace portable {
decltype(kernels::set_advantages) set_advantages;
}  // namespace portable

namespace cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kColumns = kThreads;  ///< of a chunk: one per thread

struct Arguments {
  SetRule rule;
  AnswerSets sets;
  double* memory;
  SetAdvantages out;
};

/// Sums over the block, the same on every thread.
template <int kCount>
__device__ __forceinline__ void block_sums(double (&value)[kCount]) {
  __shared__ double part[kWarps][kCount];
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) value[i] = warp_sum(value[i]);
  __syncthreads();  // the sums before may still be read
  if (thread % kWarp == 0)
#pragma unroll
    for (int i = 0; i < kCount; ++i) part[thread / kWarp][i] = value[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    value[i] = 0;
    for (int warp = 0; warp < kWarps; ++warp) value[i] += part[warp][i];
  }
}

__global__ void __launch_bounds__(kThreads) advantages(const __grid_constant__ Arguments a) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const std::int64_t prompt = blockIdx.x, samples = a.sets.samples, first = prompt * samples;
  const AnyMatrix& e = a.sets.embeddings;
  const double* const rewards = a.sets.rewards.data + first;
  // By answer: 1 / |e|, or 0 of an empty one; |y|^2; y . W.
  double* const inverse = a.memory + 3 * first;
  double* const square = inverse + samples;
  double* const product = square + samples;
  __shared__ double centre[kColumns], weighted[kColumns];
  const auto load = [&](std::int64_t i, std::int64_t column) {
    return static_cast<double>(load_element(e.data, e.type, (first + i) * e.stride + column));
  };

  for (std::int64_t i = warp; i < samples; i += kWarps) {
    double sum = 0;
#pragma unroll 4
    for (std::int64_t column = lane; column < e.columns; column += kWarp) {
      const double value = load(i, column);
      sum += value * value;
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      inverse[i] = sum == 0 ? 0.0 : 1 / sqrt(sum) + (sum - sum);  // of infinity: NaN, not 0
      square[i] = product[i] = 0;
    }
  }
  __syncthreads();
  double count[1] = {};
  for (std::int64_t i = thread; i < samples; i += kThreads) count[0] += inverse[i] != 0 ? 1.0 : 0.0;
  block_sums(count);
  const double m = count[0];

  for (std::int64_t begin = 0; begin < e.columns; begin += kColumns) {
    const std::int64_t column = begin + thread;
    if (column < e.columns) {
      double mean = 0, weights = 0;
#pragma unroll 4
      for (std::int64_t i = 0; i < samples; ++i)
        if (inverse[i] != 0) mean += inverse[i] * load(i, column);
      mean /= m;
#pragma unroll 4
      for (std::int64_t i = 0; i < samples; ++i)
        if (inverse[i] != 0) weights += rewards[i] * (inverse[i] * load(i, column) - mean);
      centre[thread] = mean;
      weighted[thread] = weights;
    }
    __syncthreads();
    const int columns = static_cast<int>(min(static_cast<std::int64_t>(kColumns), e.columns - begin));
    for (std::int64_t i = warp; i < samples; i += kWarps) {
      const double scale = inverse[i];
      if (scale == 0) continue;
      double own = 0, with = 0;
#pragma unroll 4
      for (int c = lane; c < columns; c += kWarp) {
        const double y = scale * load(i, begin + c) - centre[c];
        own += y * y;
        with += y * weighted[c];
      }
      own = warp_sum(own);
      with = warp_sum(with);
      if (lane == 0) square[i] += own, product[i] += with;
    }
    __syncthreads();
  }

  double total[3] = {};  // of |y|^2, R |y|^2 and R
  for (std::int64_t i = thread; i < samples; i += kThreads) {
    if (inverse[i] == 0) continue;
    total[0] += square[i];
    total[1] += rewards[i] * square[i];
    total[2] += rewards[i];
  }
  block_sums(total);
  const double spread = total[0], weighted_spread = total[1];
  const SetSums sums{static_cast<std::int64_t>(m), total[2], m * spread / 2,
                     (m * weighted_spread + total[2] * spread) / 2};
  if (thread == 0) {
    a.out.counts[prompt] = sums.count;
    a.out.diversity[prompt] = mean_distance(sums);
    a.out.objective[prompt] = expected_objective(a.rule, sums);
  }
  for (std::int64_t i = thread; i < samples; i += kThreads) {
    const double s = (m * square[i] + spread) / 2, q = (sums.rewards * square[i] + weighted_spread) / 2 - product[i];
    const bool present = inverse[i] != 0;
    a.out.distances[first + i] = present ? s : 0.0;
    a.out.advantages[first + i] = present ? set_advantage(a.rule, sums, rewards[i], s, q) : 0.0;
  }
}

}  // namespace

void set_advantages(const Execution& execution, const SetRule& rule, const AnswerSets& sets, Array<double> workspace,
                    const SetAdvantages& out) {
  advantages<<<static_cast<unsigned>(sets.prompts), kThreads, 0, stream_of(execution)>>>(
      {rule, sets, workspace.data, out});
  require_launch("set_advantages");
}

}  // namespace cuda
}  // namespace weft::kernels
