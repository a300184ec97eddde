// SPDX-License-Identifier: Apache-2.0
//
// The sums of a block of ids from the logits that lanes of a warp hold.
#pragma once

#include "kernels/language/sample/rule.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

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

/// All lanes of a warp call this: those whose numbers differ in the bits of kLanes alone have a block, each the logits
/// of `ids` successive ids from `first` on, or -infinity beyond the vocabulary. z: capped. largest: of these before the
/// cap. The same on the lanes of a block.
template <unsigned kLanes, int ids>
__device__ __forceinline__ BlockSum block_sum(const BlockRule& rule, float largest, const float (&z)[ids]) {
  const auto of_block = [](auto value, const auto& joined) {
#pragma unroll
    for (unsigned mask = kWarp / 2; mask > 0; mask /= 2)
      if ((kLanes & mask) != 0)
        value = joined(value, static_cast<decltype(value)>(__shfl_xor_sync(kAllLanes, value, static_cast<int>(mask))));
    return value;
  };
  largest = of_block(largest, larger);
  const float capped = capped_logit(largest, rule.softcap);
  const auto sum = [&](float scale) -> std::uint32_t {
    const PowerWeight weight(scale, capped);
    std::uint32_t value = 0;
#pragma unroll
    for (int i = 0; i < ids; ++i) value += weight(z[i]);
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
