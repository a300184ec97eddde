// SPDX-License-Identifier: Apache-2.0
//
// 16-bit floats as plain structs: bf16 (1 sign, 8 exponent, 7 mantissa bits) and IEEE half. Conversions are exact or
// round to nearest even, the same bits on host and device; NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/array.hpp"

namespace weft::kernels {

WEFT_HOST_DEVICE inline std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

WEFT_HOST_DEVICE inline float bits_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

WEFT_HOST_DEVICE inline bool is_finite(float value) { return (float_bits(value) & 0x7f800000u) != 0x7f800000u; }

struct bf16 {
  std::uint16_t bits;

  WEFT_HOST_DEVICE operator float() const { return bits_float(static_cast<std::uint32_t>(bits) << 16); }
};

struct half {
  std::uint16_t bits;

  WEFT_HOST_DEVICE operator float() const {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fu;
    const std::uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0x1f) return bits_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
    // Subnormal: mantissa * 2^-24, exact in fp32.
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return bits_float(sign | float_bits(magnitude));
#endif
  }
};

/// Round to nearest, ties to even.
WEFT_HOST_DEVICE inline bf16 to_bf16(float value) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

/// Rounds up with probability (distance to the lower neighbour) / (spacing): unbiased. `random16` is uniform in [0,
/// 65536).
WEFT_HOST_DEVICE inline bf16 to_bf16_stochastic(float value, std::uint32_t random16) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return to_bf16(value);  // infinity and NaN have no neighbour to round to
  return {static_cast<std::uint16_t>((bits + random16) >> 16)};
}

/// Round to nearest, ties to even; infinity from 65520 on.
WEFT_HOST_DEVICE inline half to_half(float value) {
#ifdef __CUDA_ARCH__
  std::uint16_t rounded;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
  return {rounded};
#else
  const std::uint32_t sign = (float_bits(value) >> 16) & 0x8000u, bits = float_bits(value) & 0x7fffffffu;
  const std::uint32_t normal = ((bits + 0xfffu + ((bits >> 13) & 1u)) >> 13) - (112u << 10);
  // 1/2 has a spacing of 2^-24 in fp32: the addition rounds to a multiple of the smallest half.
  const std::uint32_t subnormal = float_bits(bits_float(bits) + 0.5f) - float_bits(0.5f);
  std::uint32_t rounded = bits < float_bits(0x1p-14f) ? subnormal : normal;
  rounded = bits >= float_bits(65520.0f) ? 0x7c00u : rounded;
  rounded = bits > 0x7f800000u ? 0x7fffu : rounded;
  return {static_cast<std::uint16_t>(sign | rounded)};
#endif
}

template <class T>
WEFT_HOST_DEVICE inline T from_float(float value) {
  if constexpr (sizeof(T) == 4)
    return value;
  else if constexpr (std::is_same_v<T, half>)
    return to_half(value);
  else
    return to_bf16(value);
}

}  // namespace weft::kernels
