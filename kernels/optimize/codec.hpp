// SPDX-License-Identifier: Apache-2.0
//
// 8-bit codes for Adam's moments: e4m3 (1 sign, 4 exponent, 3 mantissa bits, bias 7; OCP 8-bit floating point, 2023: no
// infinity, 0x7f is NaN, largest 448, smallest 2^-9) times one fp32 scale per block. The largest magnitude of a block
// becomes 448.
//
// Integer arithmetic on the bits of an fp32 number alone: the same code on host and GPU.
//
// Codes are rounded stochastically. To nearest, a moment stays where it is whenever one step changes it by less than
// half the distance of two codes: sqrt(v) changes by 0.05 % per step while codes are 6 to 12 % apart; m decays by 10 %,
// which leaves the four smallest codes in place (with beta1 > 0.94 some of the others too), and a moment that does not
// decay moves its weight without end.
//
// A block whose gradient is zero keeps its codes: all its values shrink by the same factor, which its scale takes.
#pragma once

#include <cmath>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"

namespace weft::kernels {

constexpr float kLargestCode = 448.0f;
constexpr std::uint8_t kCodeNaN = 0x7f;

WEFT_HOST_DEVICE inline float code_to_float(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  // Normal: the exponent moves from bias 7 to 127. Subnormal: magnitude * 2^-9, exact.
  const std::uint32_t normal = (magnitude << 20) + (120u << 23);
  const std::uint32_t subnormal = float_bits(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f);
  const std::uint32_t bits = magnitude < 8u ? subnormal : normal;
  return bits_float(sign | (magnitude == 0x7fu ? 0x7fc00000u : bits));
}

/// Nearest code, ties to the even one; beyond 448 stays 448, NaN becomes 0x7f.
WEFT_HOST_DEVICE inline std::uint8_t code_nearest(float value) {
  const std::uint32_t sign = (float_bits(value) >> 24) & 0x80u;
  const std::uint32_t bits = float_bits(value) & 0x7fffffffu;
  const std::uint32_t normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // 2^14 has a spacing of 2^-9 in fp32: the addition rounds to a multiple of the smallest code.
  const std::uint32_t subnormal = float_bits(bits_float(bits) + 0x1p14f) - float_bits(0x1p14f);
  std::uint32_t code = bits < float_bits(0x1p-6f) ? subnormal : normal;
  code = bits >= float_bits(kLargestCode) ? 0x7eu : code;
  return static_cast<std::uint8_t>(sign | (bits > 0x7f800000u ? 0x7fu : code));
}

/// One of the two codes around `value`, the upper with probability (distance to the lower) / (spacing): unbiased up to
/// 2^-16 of the spacing. `random16` is uniform in [0, 65536). Beyond 448 stays 448, NaN becomes 0x7f.
WEFT_HOST_DEVICE inline std::uint8_t code_stochastic(float value, std::uint32_t random16) {
  const std::uint32_t sign = (float_bits(value) >> 24) & 0x80u;
  const std::uint32_t bits = float_bits(value) & 0x7fffffffu;
  const std::uint32_t normal = ((bits + (random16 << 4)) >> 20) - (120u << 3);
  // value in 2^-16 of the smallest code; below 2^-6 it is less than 2^19, so that the conversion to integer is safe.
  const bool small = bits < float_bits(0x1p-6f);
  const float units = small ? bits_float(bits) * 0x1p25f : 0.0f;
  const std::uint32_t subnormal = (static_cast<std::uint32_t>(static_cast<std::int32_t>(units)) + random16) >> 16;
  std::uint32_t code = small ? subnormal : normal;
  code = bits >= float_bits(kLargestCode) ? 0x7eu : code;
  return static_cast<std::uint8_t>(sign | (bits > 0x7f800000u ? 0x7fu : code));
}

/// The code of a square root of a second moment: at least the smallest, because a second moment that became 0 would
/// divide by epsilon alone. That of a parameter without a gradient so far becomes 2^-9 / 448 of its block's largest;
/// its first moment is 0 and moves no weight.
WEFT_HOST_DEVICE inline std::uint8_t code_stochastic_root(float value, std::uint32_t random16) {
  const std::uint8_t code = code_stochastic(value, random16);
  return code == 0 ? std::uint8_t{1} : code;
}

/// Scale of a block whose largest magnitude is `largest`. Below 2^-100 the block counts as zero: its reciprocal would
/// overflow.
WEFT_HOST_DEVICE inline float block_scale(float largest) { return largest < 0x1p-100f ? 0.0f : largest / kLargestCode; }
/// What values are multiplied by before coding; 0 for a block of zeros.
WEFT_HOST_DEVICE inline float inverse_scale(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }
/// Scale of a block that keeps its codes while its values shrink by `factor`; 0 where block_scale is.
WEFT_HOST_DEVICE inline float decayed_scale(float scale, float factor) {
  const float decayed = scale * factor;
  return decayed < 0x1p-100f / kLargestCode ? 0.0f : decayed;
}

}  // namespace weft::kernels
