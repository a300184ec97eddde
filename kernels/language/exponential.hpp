// SPDX-License-Identifier: Apache-2.0
//
// exp, sigmoid and tanh in fp32 from additions, products and selections alone: loops over them vectorise where calls of
// libm do not, and the bits are the same with every libm and vector width. Errors against the exact value, measured
// in tests/kernels/language/exponential_test.cpp:
//
//   exponential          1 ulp where the result is normal; 0 below 2^-126, infinity above the largest fp32
//   sigmoid              2.5 ulp
//   hyperbolic_tangent   1.5 ulp
//
// NaN stays NaN. Code for a GPU takes its own exponential and reciprocal instead (2 ulp each), which are faster there.
#pragma once

#include <cmath>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"

namespace weft::kernels {

WEFT_HOST_DEVICE inline float exponential(float x) {
#ifdef __CUDA_ARCH__
  return expf(x);
#else
  // exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer and leaves it
  // in the low bits of the mantissa.
  constexpr float kRound = 12582912.0f;
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  // ln 2 in two parts: n times the first is exact.
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  // Least largest relative error of a polynomial of degree 6, 2^-28.
  const float tail = 0.49999994f + r * (0.1666652f + r * (0.041668393f + r * (0.008368781f + r * 0.0013814467f)));
  const float power = 1.0f + (r + r * r * tail);
  const float value = bits_float(float_bits(power) + (float_bits(shifted) << 23));
  const float normal = x < -87.33654f ? 0.0f : value;
  return x <= 88.72283f ? normal : x + bits_float(0x7f800000u);
#endif
}

/// 1 / x for x >= 1.
WEFT_HOST_DEVICE inline float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  return __fdividef(1.0f, x);
#else
  return 1.0f / x;
#endif
}

/// 1 / (1 + exp(-x)).
WEFT_HOST_DEVICE inline float sigmoid(float x) { return reciprocal(1.0f + exponential(-x)); }

WEFT_HOST_DEVICE inline float hyperbolic_tangent(float x) {
  const float square = x * x;
  // Odd polynomial of degree 11 near 0, where 1 - 2 / (exp(2 |x|) + 1) cancels.
  const float tail =
      -0.33333278f + square * (0.13331331f + square * (-0.05372999f + square * (0.02060611f - square * 0.0056669004f)));
  const std::uint32_t sign = float_bits(x) & 0x80000000u;
  const float magnitude = bits_float(float_bits(x) ^ sign);
  const float beyond = 1.0f - 2.0f * reciprocal(exponential(2.0f * magnitude) + 1.0f);
  return square < 0.39f ? x + x * square * tail : bits_float(float_bits(beyond) | sign);
}

}  // namespace weft::kernels
