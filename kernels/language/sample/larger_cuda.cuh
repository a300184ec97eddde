// SPDX-License-Identifier: Apache-2.0
//
// Shared by the CUDA kernels that draw tokens.
#pragma once

#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

/// Larger of two values; NaN if one of them is NaN.
__device__ __forceinline__ float larger(float x, float y) {
#ifdef WEFT_BEFORE_AMPERE
  return x != x || x > y ? x : y;
#else
  float value;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(x), "f"(y));
  return value;
#endif
}

}  // namespace weft::kernels::cuda
