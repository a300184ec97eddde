// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. One block per row. The first pass forms the maximum and the sum of exponentials together, the second
// reads the row again, from its end, and writes the gradient: of a row of V columns in bf16 2 V bytes come from memory,
// 2 V go there, and 2 V come from the second-level cache as long as the rows in flight fit it (two blocks of 512
// threads on each of 132 multiprocessors: 26 MB at V = 50,304). An element takes one approximate power of two and five
// further instructions in each pass.
//
// Rows that cannot be read 16 bytes at a time take the portable kernel.
#include <cfloat>

#include "kernels/language/exponential.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/language/head/softmax_part.hpp"
#include "kernels/language/rows_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

/// exp(x) for x <= 0: relative error 2^-22 (the power of two) + |x| 2^-23, and 0 below 2^-126.
__device__ __forceinline__ float fast_exponential(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
  return power;
}

/// Largest value so far and the sum of exp(value - largest).
struct SoftmaxSum {
  float largest, sum;

  __device__ void add(const SoftmaxSum& other) {
    const float most = fmaxf(largest, other.largest);
    sum = sum * fast_exponential(largest - most) + other.sum * fast_exponential(other.largest - most);
    largest = most;
  }
  /// Adds the first `count` of 8 values.
  __device__ __forceinline__ void add(const float (&z)[8], int count) {
    float most = largest;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) most = fmaxf(most, z[i]);
    sum *= fast_exponential(largest - most);
    largest = most;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) sum += fast_exponential(z[i] - most);
  }
};

struct Arguments {
  CrossEntropy options;
  AnyMatrix logits;
  const std::int32_t* targets;
  float* losses;
  bool gradient;
  SoftmaxPart* parts;  ///< softmax_parts: output; cross_entropy: null
};

/// The logit before its division by the temperature; softcap 0: as stored.
__device__ __forceinline__ float capped(float a, float softcap) {
  return softcap == 0.0f ? a : softcap * hyperbolic_tangent(a / softcap);
}

/// kTransformed: logits have a cap or a temperature.
template <int kThreads, bool kTransformed>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) losses_and_gradients(const __grid_constant__ Arguments a) {
  const std::int64_t row = blockIdx.x;
  const int columns = static_cast<int>(a.logits.columns), vocabulary = static_cast<int>(a.options.vocabulary);
  const int thread = static_cast<int>(threadIdx.x), target = a.targets[row];
  const int target_column = target - static_cast<int>(a.options.first_token);
  const float softcap = a.options.softcap, inverse_temperature = 1.0f / a.options.temperature;
  if (target == kIgnored) {
    const float zero[8] = {};
    for (int column = thread * 8; a.gradient && column < columns; column += kThreads * 8)
      store_columns(a.logits, row, column, zero);
    if (thread == 0 && a.parts != nullptr) a.parts[row] = {};
    if (thread == 0 && a.parts == nullptr) a.losses[row] = 0.0f;
    return;
  }
  // Every thread reads the target's logit before the barriers below; the row is overwritten after them.
  float target_logit = 0.0f;
  if (target_column >= 0 && target_column < vocabulary) {
    target_logit = load_element(a.logits.data, a.logits.type, row * a.logits.stride + target_column);
    if constexpr (kTransformed) target_logit = inverse_temperature * capped(target_logit, softcap);
  }

  SoftmaxSum softmax{-FLT_MAX, 0.0f};
  const auto add = [&](int column, int count) {
    float z[8];
    load_columns_again(a.logits, row, column, z);
    if constexpr (kTransformed) {
#pragma unroll
      for (int i = 0; i < 8; ++i) z[i] = inverse_temperature * capped(z[i], softcap);
    }
    softmax.add(z, count);
  };
  const int whole = vocabulary / 8;  // groups of 8 columns without padding
  const bool joins = a.options.parts.size > 0;
#pragma unroll 4
  for (int v = joins ? whole : thread; v < whole; v += kThreads) add(v * 8, 8);
  if (!joins && whole * 8 < vocabulary && thread == whole % kThreads) add(whole * 8, vocabulary - whole * 8);
  __shared__ SoftmaxSum of_warp[kThreads / kWarp];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    softmax.add({__shfl_xor_sync(kAllLanes, softmax.largest, offset), __shfl_xor_sync(kAllLanes, softmax.sum, offset)});
  if (thread % kWarp == 0) of_warp[thread / kWarp] = softmax;
  __syncthreads();
  softmax = of_warp[0];
  for (int w = 1; w < kThreads / kWarp; ++w) softmax.add(of_warp[w]);
  if (a.parts != nullptr) {
    if (thread == 0) a.parts[row] = {softmax.largest, softmax.sum, target_logit};
    return;
  }
  if (joins) {
    const SoftmaxPart all = joined_parts(a.options.parts, row, a.logits.rows);
    softmax = {all.largest, all.sum};
    target_logit = all.target_logit;
  }

  const float largest = softmax.largest, log_sum = logf(softmax.sum), lse = largest + log_sum;
  if (thread == 0) a.losses[row] = (largest - target_logit) + log_sum + a.options.z_loss * lse * lse;
  if (!a.gradient) return;
  const float weight = *a.options.scale * (a.options.weights.data == nullptr ? 1.0f : a.options.weights[row]);
  const float factor = kTransformed ? weight * inverse_temperature : weight;
  const float probability = factor * ((1.0f + 2.0f * a.options.z_loss * lse) / softmax.sum);
  const int turns = (columns / 8 + kThreads - 1) / kThreads;
#pragma unroll 2
  for (int turn = turns - 1; turn >= 0; --turn) {
    const int column = (turn * kThreads + thread) * 8;
    if (column >= columns) continue;
    float z[8], slope[8];
    load_columns(a.logits, row, column, z);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kTransformed) {
        const float value = capped(z[i], softcap);
        slope[i] = softcap == 0.0f ? 1.0f : 1.0f - (value / softcap) * (value / softcap);
        z[i] = inverse_temperature * value;
      }
      z[i] = fast_exponential(z[i] - largest) * probability;
    }
    if (target_column >= column && target_column < column + 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i == target_column) z[i] -= factor;
    }
    if constexpr (kTransformed) {
#pragma unroll
      for (int i = 0; i < 8; ++i) z[i] *= slope[i];
    }
    if (column + 8 > vocabulary) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i >= vocabulary) z[i] = 0.0f;
    }
    store_columns(a.logits, row, column, z);
  }
}

template <int kThreads>
void launch_blocks(const Execution& execution, const Arguments& a) {
  const unsigned rows = static_cast<unsigned>(a.logits.rows);
  if (a.options.softcap != 0.0f || a.options.temperature != 1.0f)
    losses_and_gradients<kThreads, true><<<rows, kThreads, 0, stream_of(execution)>>>(a);
  else
    losses_and_gradients<kThreads, false><<<rows, kThreads, 0, stream_of(execution)>>>(a);
}

void launch(const Execution& execution, const Arguments& a, const char* name) {
  if (a.logits.columns >= 4096)
    launch_blocks<512>(execution, a);
  else
    launch_blocks<128>(execution, a);
  require_launch(name);
}

}  // namespace

void softmax_parts(const Execution& execution, const CrossEntropy& options, AnyMatrix logits,
                   Array<const std::int32_t> targets, Array<SoftmaxPart> parts) {
  if (!vectors_fit(logits.columns, logits)) return portable::softmax_parts(execution, options, logits, targets, parts);
  if (logits.rows > 0) launch(execution, {options, logits, targets.data, nullptr, false, parts.data}, "softmax_parts");
}

void cross_entropy(const Execution& execution, const CrossEntropy& options, AnyMatrix logits,
                   Array<const std::int32_t> targets, Array<float> losses, bool gradient) {
  if (!vectors_fit(logits.columns, logits))
    return portable::cross_entropy(execution, options, logits, targets, losses, gradient);
  if (logits.rows > 0)
    launch(execution, {options, logits, targets.data, losses.data, gradient, nullptr}, "cross_entropy");
}

}  // namespace weft::kernels::cuda
