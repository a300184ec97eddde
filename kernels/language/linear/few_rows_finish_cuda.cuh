// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows on a GPU: what their kernels share. The sums of a tile, which blocks of a cluster send to the
// block that adds them up, and what follows a sum: a norm, an activation, or the sum with the residual stream, from
// which its moments and scaled rows follow.
#pragma once

#include <type_traits>

#include "kernels/language/activation/activation_rule.hpp"
#include "kernels/language/attention/flash_context_cuda.cuh"
#include "kernels/language/linear/few_rows.hpp"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels::cuda {

constexpr std::int64_t kNarrowTile = 32;  ///< outputs

enum class FewRowsAfter : int { nothing, gelu, relu2 };

struct FewRowsArguments {
  FewRowsOperands operands;
  const float* bias;     ///< or null
  const float* factors;  ///< of normalised rows NormTerms::sums, with `scaled` its weights; or null
  const bf16* residual;  ///< added to y; or null
  bf16* y;
  bf16* scaled;      ///< weights ∘ the sum with the residual; or null
  Moments* moments;  ///< of the sum with the residual, [rows, moment_groups(outputs)]
  std::int64_t residual_stride, y_stride, scaled_stride;
  FewRowsAfter after;
};

/// Stores the first `count` of successive outputs, or all if there are fewer.
template <int kCount>
__device__ __forceinline__ void store_outputs(bf16* to, const bf16 (&value)[kCount], int count) {
  if constexpr (kCount == 4) {
    if (count >= 4) {
      *reinterpret_cast<uint2*>(to) = {value[0].bits | unsigned{value[1].bits} << 16,
                                       value[2].bits | unsigned{value[3].bits} << 16};
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < count) to[i] = value[i];
  }
}

/// Leaves the moments of the group of columns to which `kCount` successive outputs of row `row` belong. All lanes of a
/// warp call this together, with successive outputs: kMomentColumns / kCount of them have a group.
///
/// Both sums are formed at once, of deviations from the first column. That column is one of the group, so the squares
/// of these are at most kMomentColumns times those about the mean: few digits cancel.
template <int kCount>
__device__ __forceinline__ void leave_moments(const FewRowsArguments& a, int row, int output,
                                              const bf16 (&stored)[kCount]) {
  constexpr int kLanes = kMomentColumns / kCount;
  const int outputs = a.operands.outputs, group = output / kMomentColumns,
            columns = max(1, min(kMomentColumns, outputs - group * kMomentColumns));
  const float share = __fdividef(1.0f, static_cast<float>(columns)),
              origin = __shfl_sync(kAllLanes, float{stored[0]}, 0, kLanes);
  float distance[kCount], square[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    distance[i] = output + i < outputs ? float{stored[i]} - origin : 0.0f;
    square[i] = __fmul_rn(distance[i], distance[i]);  // not contracted with a sum that follows
  }
  // In pairs of neighbours: the same bits with any kCount.
  const auto of_thread = [](const float(&value)[kCount]) {
    return kCount == 1 ? value[0] : (value[0] + value[1 % kCount]) + (value[2 % kCount] + value[3 % kCount]);
  };
  float sum = of_thread(distance), squares = of_thread(square);
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, mask);
    squares += __shfl_xor_sync(kAllLanes, squares, mask);
  }
  if (output % kMomentColumns == 0 && row < a.operands.rows && output < outputs)
    a.moments[row * moment_groups(outputs) + group] = {__fmaf_rn(sum, share, origin),
                                                       __fmaf_rn(-sum, __fmul_rn(sum, share), squares)};
}

/// Finishes `kCount` successive outputs of row `row`. All lanes of a warp call this together, with successive outputs.
template <int kCount>
__device__ __forceinline__ void finish_outputs(const FewRowsArguments& a, int row, int output,
                                               const float (&sum)[kCount], const float (&bias)[kCount],
                                               const float (&factor)[kCount], const bf16 (&residual)[kCount]) {
  const int count = row < a.operands.rows ? a.operands.outputs - output : 0;  // at most kCount are used
  bf16 value[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) value[i] = to_bf16(sum[i] + bias[i]);
  if (a.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = to_bf16(float{residual[i]} + float{value[i]});
  }
  if (a.after != FewRowsAfter::nothing) {
    const auto activate = [&]<MlpActivation kind>(std::integral_constant<MlpActivation, kind>) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] = to_bf16(activated<kind>(value[i]));
    };
    // One branch for all outputs: the latencies of their exponentials and divisions overlap.
    if (a.after == FewRowsAfter::gelu)
      activate(std::integral_constant<MlpActivation, MlpActivation::gelu>());
    else
      activate(std::integral_constant<MlpActivation, MlpActivation::relu2>());
  }
  store_outputs<kCount>(a.y + row * a.y_stride + output, value, count);
  if (a.residual == nullptr) return;
  if (a.scaled != nullptr) {
    bf16 scaled[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) scaled[i] = to_bf16(float{value[i]} * factor[i]);
    store_outputs<kCount>(a.scaled + row * a.scaled_stride + output, scaled, count);
  }
  leave_moments<kCount>(a, row, output, value);
}

#ifndef WEFT_BEFORE_AMPERE
/// Receives data that blocks of a cluster send to this block's shared memory: a barrier counts the bytes that have
/// arrived (PTX ISA: mbarrier, st.async). It is faster than a barrier of the cluster, which waits for all memory
/// accesses of all threads. A block ends only when all that it expects has arrived, and is sent nothing else.
class Arrivals {
 public:
  __device__ __forceinline__ explicit Arrivals(std::uint64_t* memory) : barrier_(shared_address(memory)) {}

  /// Creates the barrier. Called by one thread of the receiving block, then __syncwarp(): the compiler may create a
  /// barrier by the whole warp.
  __device__ __forceinline__ void create() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(barrier_)
                 : "memory");
#endif
  }
  /// Announces the bytes that will arrive. Called by the thread that called create(), before the barrier of the
  /// cluster.
  __device__ __forceinline__ void expect(int bytes) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_), "r"(bytes) : "memory");
#endif
  }
  /// Address of `to` in block `rank`, the same as in this block, and the barrier of that block.
  struct Place {
    std::uint32_t at, barrier;
  };
  __device__ __forceinline__ Place place(const void* to, int rank) const {
    return {there(shared_address(to), rank), there(barrier_, rank)};
  }
  /// Sends a value to `offset` bytes after `to`.
  __device__ __forceinline__ void send(Place to, int offset, float4 value) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
                     to.at + static_cast<std::uint32_t>(offset)),
                 "r"(to.barrier), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
                 : "memory");
#endif
  }
  /// Sends a value to `to` in block `rank`.
  __device__ __forceinline__ void send(const void* to, int rank, float4 value) const {
    send(place(to, rank), 0, value);
  }
  /// Waits until all bytes have arrived.
  __device__ __forceinline__ void wait() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra WAIT;\n}" ::
            "r"(barrier_)
        : "memory");
#endif
  }

 private:
  __device__ __forceinline__ static std::uint32_t shared_address(const void* memory) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(memory));
  }
  __device__ __forceinline__ static std::uint32_t there(std::uint32_t address, int rank) {
    std::uint32_t result = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
#endif
    return result;
  }
  std::uint32_t barrier_;
};
#endif

/// Outputs that a thread finishes at a time: kCount (1 or 4) successive outputs of a row.
template <int kCount>
struct OwnOutputs {
  int row, output;
  float bias[kCount] = {}, factor[kCount] = {};
  bf16 residual[kCount] = {};

  /// Reads the residual rows, which other kernels have written.
  __device__ __forceinline__ void load_residual(const FewRowsArguments& a) {
    if (a.residual == nullptr || row >= a.operands.rows) return;
    const bf16* const from = a.residual + row * a.residual_stride + output;
    if constexpr (kCount == 4) {
      if (output + 4 <= a.operands.outputs) {
        const uint2 read = __ldcg(reinterpret_cast<const uint2*>(from));
        residual[0].bits = static_cast<std::uint16_t>(read.x);
        residual[1].bits = static_cast<std::uint16_t>(read.x >> 16);
        residual[2].bits = static_cast<std::uint16_t>(read.y);
        residual[3].bits = static_cast<std::uint16_t>(read.y >> 16);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (output + i < a.operands.outputs) residual[i].bits = __ldcg(&from[i].bits);
    }
  }

  /// Reads what depends on the outputs alone.
  __device__ __forceinline__ void load_vectors(const FewRowsArguments& a) {
    load(a, a.bias, bias);
    load(a, a.factors, factor);
  }

 private:
  __device__ __forceinline__ void load(const FewRowsArguments& a, const float* from, float (&to)[kCount]) const {
    if (from == nullptr) return;
    if constexpr (kCount == 4) {
      if (output + 4 <= a.operands.outputs) {
        const FewRowsColumns read = *reinterpret_cast<const FewRowsColumns*>(from + output);
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = read.value[i];
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (output + i < a.operands.outputs) to[i] = from[output + i];
    }
  }
};

}  // namespace weft::kernels::cuda
