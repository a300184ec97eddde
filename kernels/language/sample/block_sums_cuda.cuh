// SPDX-License-Identifier: Apache-2.0
//
// The sums of a block of ids from the logits that lanes of a warp hold.
#pragma once

#include "kernels/language/sample/rule.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

constexpr int kIdsOfLane = 8, kLanesOfBlock = kDrawBlock / kIdsOfLane;

/// NaN if one of them is.
__device__ __forceinline__ float larger(float x, float y) {
#ifdef WEFT_BEFORE_AMPERE
  return x != x || x > y ? x : y;
#else
  float value;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(x), "f"(y));
  return value;
#endif
}

/// All lanes of a warp call this: 16 lanes have a block, each the logits of 8 successive ids from `first` on. The same
/// on the lanes of a block.
__device__ __forceinline__ BlockSum block_sum(const BlockRule& rule, std::int64_t first, float (&z)[kIdsOfLane]) {
  const auto of_block = [](auto value, const auto& joined) {
#pragma unroll
    for (int mask = kLanesOfBlock / 2; mask > 0; mask /= 2)
      value = joined(value, static_cast<decltype(value)>(__shfl_xor_sync(kAllLanes, value, mask)));
    return value;
  };
  if (first + kIdsOfLane > rule.vocabulary)
#pragma unroll
    for (int i = 0; i < kIdsOfLane; ++i)
      if (first + i >= rule.vocabulary) z[i] = -INFINITY;
  float largest = z[0];
#pragma unroll
  for (int i = 1; i < kIdsOfLane; ++i) largest = larger(largest, z[i]);
  largest = of_block(largest, larger);
  if (rule.softcap > 0)
#pragma unroll
    for (int i = 0; i < kIdsOfLane; ++i)
      if (first + i < rule.vocabulary) z[i] = capped_logit(z[i], rule.softcap);
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

}  // namespace weft::kernels::cuda
