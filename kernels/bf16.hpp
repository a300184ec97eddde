// SPDX-License-Identifier: Apache-2.0
//
// 16-bit floats as plain structs: bf16 (1 sign, 8 exponent, 7 mantissa bits) and IEEE half. Conversions are exact or
// round to nearest even, the same bits on host and device; NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

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
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fu;
    const std::uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0x1f) return bits_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
    // Subnormal: mantissa * 2^-24, exact in fp32.
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return bits_float(sign | float_bits(magnitude));
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

template <class T>
WEFT_HOST_DEVICE inline T from_float(float value) {
  if constexpr (sizeof(T) == 4)
    return value;
  else
    return to_bf16(value);
}

}  // namespace weft::kernels
