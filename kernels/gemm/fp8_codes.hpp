// SPDX-License-Identifier: Apache-2.0
//
// The 8-bit formats of coded matrices (fp8.hpp; OCP 8-bit floating point, 2023): e4m3 (optimize/codec.hpp), for
// activations and weights, and e5m2 (1 sign, 5 exponent, 2 mantissa bits, bias 15: the upper byte of fp16), for
// gradients, whose magnitudes spread further. Integer arithmetic on the bits of an fp32 number alone.
#pragma once

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/optimize/codec.hpp"

namespace weft::kernels {

enum class CodeType : int { e4m3, e5m2 };

constexpr float kLargestWideCode = 57344.0f;  ///< of e5m2: 1.75 * 2^15
constexpr std::uint8_t kWideCodeNaN = 0x7f;
constexpr std::int32_t kInfinityBits = 0x7f800000;

/// Value of an e5m2 code; exact.
WEFT_HOST_DEVICE inline float wide_code_to_float(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  // Normal: the exponent moves from bias 15 to 127. Subnormal: magnitude * 2^-16. From 0x7c on: infinity and NaN.
  const std::uint32_t normal = (magnitude << 21) + (112u << 23);
  const std::uint32_t subnormal = float_bits(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-16f);
  const std::uint32_t special = magnitude == 0x7cu ? 0x7f800000u : 0x7fc00000u;
  return bits_float(sign | (magnitude >= 0x7cu ? special : magnitude < 4u ? subnormal : normal));
}

/// Nearest e5m2 code, ties to the even one; beyond 57344 stays 57344, NaN becomes 0x7f.
WEFT_HOST_DEVICE inline std::uint8_t wide_code_nearest(float value) {
  const std::uint32_t sign = (float_bits(value) >> 24) & 0x80u;
  const std::uint32_t bits = float_bits(value) & 0x7fffffffu;
  const std::uint32_t normal = ((bits + 0xfffffu + ((bits >> 21) & 1u)) >> 21) - (112u << 2);
  // 2^7 has a spacing of 2^-16 in fp32: the addition rounds to a multiple of the smallest code.
  const std::uint32_t subnormal = float_bits(bits_float(bits) + 0x1p7f) - float_bits(0x1p7f);
  std::uint32_t code = bits < float_bits(0x1p-14f) ? subnormal : normal;
  code = bits >= float_bits(kLargestWideCode) ? 0x7bu : code;
  return static_cast<std::uint8_t>(sign | (bits > 0x7f800000u ? 0x7fu : code));
}

WEFT_HOST_DEVICE inline float value_of_code(CodeType type, std::uint8_t code) {
  return type == CodeType::e4m3 ? code_to_float(code) : wide_code_to_float(code);
}
WEFT_HOST_DEVICE inline std::uint8_t code_of_value(CodeType type, float value) {
  return type == CodeType::e4m3 ? code_nearest(value) : wide_code_nearest(value);
}

/// Bits of |value|: as integers in the order of the magnitudes, infinity and NaN above all numbers.
WEFT_HOST_DEVICE inline std::int32_t magnitude_bits(float value) {
  return static_cast<std::int32_t>(float_bits(value) & 0x7fffffffu);
}

/// Scale of a matrix whose largest magnitude has these bits: the power of two with which it comes to lie in
/// (1/4, 1/2] of the largest code. Until a value exceeds that magnitude by a factor of two, none saturates. 1 for 0 and
/// for what is not finite.
WEFT_HOST_DEVICE inline float code_scale(std::int32_t largest, CodeType type) {
  if (largest == 0 || largest >= kInfinityBits) return 1.0f;
  // The largest codes are 1.75 * 2^8 and 1.75 * 2^15.
  constexpr std::int32_t kLargestFraction = 0x600000;  // of 1.75
  const std::int32_t exponent = (largest >> 23) - 127, fraction = largest & 0x7fffff;
  const std::int32_t power = exponent - (type == CodeType::e4m3 ? 7 : 14) + (fraction > kLargestFraction ? 1 : 0);
  const std::int32_t bounded = power < -100 ? -100 : power > 100 ? 100 : power;
  return bits_float(static_cast<std::uint32_t>(bounded + 127) << 23);
}

}  // namespace weft::kernels
