// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. One block per row. The first pass forms the maximum and the sum of exponentials together, the second
// reads the row again, from its end, and writes the gradient: of a row of V columns in bf16 2 V bytes come from memory,
// 2 V go there, and 2 V come from the second-level cache as long as the rows in flight fit it (two blocks of 1,024
// threads on each of 132 multiprocessors: 26 MB at V = 50,304).
//
// Rows that cannot be read 16 bytes at a time take the portable kernel.
#include <cfloat>

#include "kernels/language/exponential.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/language/rows_cuda.cuh"

namespace weft::kernels {

namespace portable {
decltype(kernels::cross_entropy) cross_entropy;
}  // namespace portable

namespace cuda {
namespace {

/// Largest value so far and the sum of exp(value - largest).
struct SoftmaxSum {
  float largest, sum;

  __device__ void add(const SoftmaxSum& other) {
    const float most = fmaxf(largest, other.largest);
    sum = sum * exponential(largest - most) + other.sum * exponential(other.largest - most);
    largest = most;
  }
};

struct Arguments {
  CrossEntropy options;
  AnyMatrix logits;
  const std::int32_t* targets;
  float* losses;
  bool gradient;
};

__device__ __forceinline__ float capped(float a, float softcap) {
  return softcap == 0.0f ? a : softcap * hyperbolic_tangent(a / softcap);
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) losses_and_gradients(const __grid_constant__ Arguments a) {
  const std::int64_t row = blockIdx.x, columns = a.logits.columns, vocabulary = a.options.vocabulary;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t target = a.targets[row];
  if (target == kIgnored) {
    const float zero[8] = {};
    for (std::int64_t column = thread * 8; a.gradient && column < columns; column += kThreads * 8)
      store_columns(a.logits, row, column, zero);
    if (thread == 0) a.losses[row] = 0.0f;
    return;
  }
  // Every thread reads the target's logit before the barriers below; the row is overwritten after them.
  const float target_logit =
      capped(load_element(a.logits.data, a.logits.type, row * a.logits.stride + target), a.options.softcap);

  SoftmaxSum softmax{-FLT_MAX, 0.0f};
  for (std::int64_t column = thread * 8; column < vocabulary; column += kThreads * 8) {
    float z[8];
    load_columns_again(a.logits, row, column, z);
    float largest = softmax.largest;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      z[i] = column + i < vocabulary ? capped(z[i], a.options.softcap) : -FLT_MAX;
      largest = fmaxf(largest, z[i]);
    }
    float sum = softmax.sum * exponential(softmax.largest - largest);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < vocabulary) sum += exponential(z[i] - largest);
    softmax = {largest, sum};
  }
  __shared__ SoftmaxSum of_warp[kThreads / kWarp];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    softmax.add({__shfl_xor_sync(kAllLanes, softmax.largest, offset), __shfl_xor_sync(kAllLanes, softmax.sum, offset)});
  if (thread % kWarp == 0) of_warp[thread / kWarp] = softmax;
  __syncthreads();
  softmax = of_warp[0];
  for (int w = 1; w < kThreads / kWarp; ++w) softmax.add(of_warp[w]);

  const float log_sum = logf(softmax.sum), lse = softmax.largest + log_sum;
  if (thread == 0) a.losses[row] = (softmax.largest - target_logit) + log_sum + a.options.z_loss * lse * lse;
  if (!a.gradient) return;
  const float factor = *a.options.scale * (a.options.weights.data == nullptr ? 1.0f : a.options.weights[row]);
  const float probability = (1.0f + 2.0f * a.options.z_loss * lse) / softmax.sum;
  const std::int64_t vectors = columns / 8;
  for (std::int64_t v = (vectors - 1 - thread) / kThreads * kThreads + thread; v >= 0 && thread < vectors;
       v -= kThreads) {
    const std::int64_t column = v * 8;
    float z[8];
    load_columns(a.logits, row, column, z);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column + i >= vocabulary) {
        z[i] = 0.0f;
        continue;
      }
      const float value = capped(z[i], a.options.softcap), share = value / a.options.softcap;
      z[i] = factor * (exponential(value - softmax.largest) * probability - (column + i == target ? 1.0f : 0.0f));
      if (a.options.softcap != 0.0f) z[i] *= 1.0f - share * share;
    }
    store_columns(a.logits, row, column, z);
  }
}

}  // namespace

void cross_entropy(const Execution& execution, const CrossEntropy& options, AnyMatrix logits,
                   Array<const std::int32_t> targets, Array<float> losses, bool gradient) {
  if (!vectors_fit(logits.columns, logits))
    return portable::cross_entropy(execution, options, logits, targets, losses, gradient);
  if (logits.rows == 0) return;
  const Arguments a{options, logits, targets.data, losses.data, gradient};
  const unsigned rows = static_cast<unsigned>(logits.rows);
  if (logits.columns >= 8192)
    losses_and_gradients<1024><<<rows, 1024, 0, stream_of(execution)>>>(a);
  else
    losses_and_gradients<128><<<rows, 128, 0, stream_of(execution)>>>(a);
  require_launch("cross_entropy");
}

}  // namespace cuda
}  // namespace weft::kernels
