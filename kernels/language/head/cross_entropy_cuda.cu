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

/// 2^x: one instruction, 2 ulp; 0 below 2^-126.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.44269504f;

/// Largest value so far and the sum of exp(value - largest).
struct SoftmaxSum {
  float largest, sum;

  __device__ void add(const SoftmaxSum& other) {
    const float most = fmaxf(largest, other.largest);
    sum = sum * power_of_two((largest - most) * kLog2E) + other.sum * power_of_two((other.largest - most) * kLog2E);
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

__device__ __forceinline__ float capped(float a, float softcap) { return softcap * hyperbolic_tangent(a / softcap); }

/// kCap: logits are soft-capped.
template <int kThreads, bool kCap>
__global__ void __launch_bounds__(kThreads) losses_and_gradients(const __grid_constant__ Arguments a) {
  const std::int64_t row = blockIdx.x;
  const int columns = static_cast<int>(a.logits.columns), vocabulary = static_cast<int>(a.options.vocabulary);
  const int thread = static_cast<int>(threadIdx.x), target = a.targets[row];
  const float softcap = a.options.softcap;
  if (target == kIgnored) {
    const float zero[8] = {};
    for (int column = thread * 8; a.gradient && column < columns; column += kThreads * 8)
      store_columns(a.logits, row, column, zero);
    if (thread == 0) a.losses[row] = 0.0f;
    return;
  }
  // Every thread reads the target's logit before the barriers below; the row is overwritten after them.
  float target_logit = load_element(a.logits.data, a.logits.type, row * a.logits.stride + target);
  if constexpr (kCap) target_logit = capped(target_logit, softcap);

  SoftmaxSum softmax{-FLT_MAX, 0.0f};
  for (int column = thread * 8; column < vocabulary; column += kThreads * 8) {
    float z[8];
    load_columns_again(a.logits, row, column, z);
    if (column + 8 > vocabulary)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i >= vocabulary) z[i] = -FLT_MAX;
    float largest = softmax.largest;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kCap) z[i] = column + i < vocabulary ? capped(z[i], softcap) : -FLT_MAX;
      largest = fmaxf(largest, z[i]);
    }
    const float offset = largest * kLog2E;
    float sum = softmax.sum * power_of_two(softmax.largest * kLog2E - offset);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += power_of_two(z[i] * kLog2E - offset);
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
  const float probability = factor * (1.0f + 2.0f * a.options.z_loss * lse) / softmax.sum;
  const float offset = softmax.largest * kLog2E;
  const int vectors = columns / 8;
  for (int v = (vectors - 1 - thread) / kThreads * kThreads + thread; v >= 0 && thread < vectors; v -= kThreads) {
    const int column = v * 8;
    float z[8];
    load_columns(a.logits, row, column, z);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float slope = 1.0f;
      if constexpr (kCap) {
        z[i] = capped(z[i], softcap);
        slope = 1.0f - (z[i] / softcap) * (z[i] / softcap);
      }
      z[i] = power_of_two(z[i] * kLog2E - offset) * probability;
      if (column + i == target) z[i] -= factor;
      if (column + i >= vocabulary) z[i] = 0.0f;
      if constexpr (kCap) z[i] *= slope;
    }
    store_columns(a.logits, row, column, z);
  }
}

template <int kThreads>
void launch(const Execution& execution, const Arguments& a) {
  const unsigned rows = static_cast<unsigned>(a.logits.rows);
  if (a.options.softcap == 0.0f)
    losses_and_gradients<kThreads, false><<<rows, kThreads, 0, stream_of(execution)>>>(a);
  else
    losses_and_gradients<kThreads, true><<<rows, kThreads, 0, stream_of(execution)>>>(a);
  require_launch("cross_entropy");
}

}  // namespace

void cross_entropy(const Execution& execution, const CrossEntropy& options, AnyMatrix logits,
                   Array<const std::int32_t> targets, Array<float> losses, bool gradient) {
  if (!vectors_fit(logits.columns, logits))
    return portable::cross_entropy(execution, options, logits, targets, losses, gradient);
  if (logits.rows == 0) return;
  const Arguments a{options, logits, targets.data, losses.data, gradient};
  logits.columns >= 8192 ? launch<1024>(execution, a) : launch<128>(execution, a);
}

}  // namespace cuda
}  // namespace weft::kernels
