// SPDX-License-Identifier: Apache-2.0
//
// Adam for the eight columns that one lane of a warp holds; the 256 columns of a warp are one block of 8-bit
// storage. Used by all kernels that update matrices on the GPU: decoder, encoder and explicit gradients.
//
// The rule is that of adam_rule.hpp with folded constants and the GPU's approximate square root and reciprocal
// (each within 2^-22): an update differs from the exact rule by less than 1e-6 of itself. An exact square root and
// division cost as many instructions as everything else, and the 8-bit kernels are close to the limit of instruction
// issue. Codes, random bits and their use are those of codec.hpp and adam_rule.hpp, bit for bit for equal moments.
// Coding a first moment stochastically takes 4.75 instructions, 3 more than the converter to the nearest code; a block
// without a gradient codes and stores neither moment.
//
// fp32 weights are two planes: hi = bf16 rounded to nearest (halves away from zero), rest = bits(w) - (bits(hi) << 16).
#pragma once

#include "kernels/optimize/codec.hpp"
#include "kernels/optimize/epilogue.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

constexpr int kLaneColumns = 8;
static_assert(kLaneColumns * kWarp == kBlockColumns && kLaneColumns == kElementsPerRandom);

/// The step's constants: w' = keep * w - m' / (denominator * sqrt(v') + epsilon).
struct AdamRate {
  float beta1, first_factor;   // m' = beta1 * m + first_factor * g
  float beta2, second_factor;  // v' = beta2 * v + (second_factor * g)^2
  float root_beta2;
  float denominator, epsilon, keep;
  // Constants for 8-bit storage, which scales the moments in any case: m and sqrt(v) in units of first_factor and
  // second_factor, so that m' = first_keep * m + g, v' = (root_keep * sqrt(v))^2 + g^2, and the same step is
  // m' / (unit_denominator * sqrt(v') + unit_epsilon).
  float first_unit, root_unit;
  float first_keep, root_keep;  // factors of the stored moments
  float unit_denominator, unit_epsilon;
  std::uint64_t step;
  std::uint32_t withheld;                       // not 0: nothing is updated
  std::uint32_t round_key[kRoundingRounds][2];  // round keys of philox, from the seed
};

/// rounding_random of adam_rule.hpp with precomputed round keys: if `rate` is in constant memory they are operands of
/// the instructions, which saves a third of the work.
__device__ __forceinline__ Random4 rounding_random(const AdamRate& rate, std::uint64_t group) {
  std::uint32_t c0 = static_cast<std::uint32_t>(group), c1 = static_cast<std::uint32_t>(group >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(rate.step);
  std::uint32_t c3 =
      static_cast<std::uint32_t>(rate.step >> 32) ^ (static_cast<std::uint32_t>(Purpose::weight_rounding) << 24);
#pragma unroll
  for (int round = 0; round < kRoundingRounds; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(0xD2511F53u) * c0;
    const std::uint64_t p1 = static_cast<std::uint64_t>(0xCD9E8D57u) * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ rate.round_key[round][0];
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ rate.round_key[round][1];
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
  }
  return {{c0, c1, c2, c3}};
}
/// The parts of the moments: part ^ kFirstMomentPart and part ^ kSecondMomentPart of the weights' (adam_rule.hpp).
static_assert(kFirstMomentPart == 2 && kSecondMomentPart == 4);
__device__ __forceinline__ Random4 first_moment_random(const Random4& r) {
  return {{r.word[1], r.word[0], r.word[3], r.word[2]}};
}
__device__ __forceinline__ Random4 second_moment_random(const Random4& r) {
  return {{r.word[2], r.word[3], r.word[0], r.word[1]}};
}

__device__ inline AdamRate adam_rate(const AdamStep& step) {
  AdamRate rate;
  rate.beta1 = step.beta1;
  rate.first_factor = step.first_gain * step.gradient_scale;
  rate.beta2 = step.beta2;
  rate.second_factor = sqrtf(step.second_gain) * step.gradient_scale;
  rate.root_beta2 = sqrtf(step.beta2);
  // lr * c1 / (sqrt(v c2) + eps) with all constants moved into the denominator. With a learning rate of 0 the
  // reciprocal of the denominator is exactly 0.
  constexpr float kHuge = 3e38f;
  const float inverse = 1.0f / (step.learning_rate * step.first_correction);
  rate.denominator = fminf(sqrtf(step.second_correction) * inverse, kHuge);
  rate.epsilon = fminf(step.epsilon * inverse, kHuge);
  constexpr float kSmallestUnit = 1e-18f;  // the square of a root in units stays finite
  rate.first_unit = fmaxf(rate.first_factor, kSmallestUnit);
  rate.root_unit = fmaxf(rate.second_factor, kSmallestUnit);
  rate.first_keep = step.beta1 / rate.first_unit;
  rate.root_keep = rate.root_beta2 / rate.root_unit;
  rate.unit_denominator = fminf(rate.denominator * rate.root_unit / rate.first_unit, kHuge);
  rate.unit_epsilon = fminf(rate.epsilon / rate.first_unit, kHuge);
  if (step.learning_rate == 0.0f) rate.denominator = rate.epsilon = rate.unit_denominator = rate.unit_epsilon = kHuge;
  rate.keep = 1.0f - step.learning_rate * step.weight_decay;
  rate.step = step.step;
  rate.withheld = step.withheld;
#pragma unroll
  for (int round = 0; round < kRoundingRounds; ++round) {
    rate.round_key[round][0] = static_cast<std::uint32_t>(step.seed) + static_cast<std::uint32_t>(round) * 0x9E3779B9u;
    rate.round_key[round][1] =
        static_cast<std::uint32_t>(step.seed >> 32) + static_cast<std::uint32_t>(round) * 0xBB67AE85u;
  }
  return rate;
}

__device__ __forceinline__ float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float approximate_root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- storage: what a lane loads and stores of eight consecutive columns

template <StorageType storage>
struct LaneState;
template <>
struct LaneState<StorageType::fp32> {
  uint4 weight, rest;
  float4 first[2], second[2];
};
template <>
struct LaneState<StorageType::bf16> {
  uint4 weight, first, second;
};
template <>
struct LaneState<StorageType::eight_bit> {
  uint4 weight;
  uint2 first, second;
  float first_scale, second_scale;  // kept by the caller
};

/// The arrays of one ParameterRows as kernel arguments.
struct StatePointers {
  std::uint16_t* weight;
  std::int16_t* rest;
  void* first;
  void* second;
  float* first_scale;
  float* second_scale;
  std::uint64_t first_element;  // global index of row 0, column 0 of this shard
};

inline StatePointers pointers_of(const ParameterRows& p) {
  return {static_cast<std::uint16_t*>(p.weight),
          p.weight_rest,
          p.first_moment,
          p.second_moment,
          p.first_scale,
          p.second_scale,
          p.global_element(0, 0)};
}

/// fp32 weights must be split into planes; 8-byte groups of random bits must not straddle lanes for the vector path.
inline void require_cuda_storage(const ParameterRows& p) {
  if (p.storage == StorageType::fp32 && p.weight_rest == nullptr && p.rows > 0)
    throw Error(ExitCode::internal, "fp32 weights on the GPU are two planes (weight_rest is null)");
}
inline bool has_vector_storage(const ParameterRows& p) {
  return p.segment % kLaneColumns == 0 && p.columns % kLaneColumns == 0 && p.global_element(0, 0) % kLaneColumns == 0 &&
         is_aligned(p.weight, 16) && is_aligned(p.weight_rest, 16) && is_aligned(p.first_moment, 16) &&
         is_aligned(p.second_moment, 16);
}

// State is accessed once per step: .cs keeps it from evicting the shared rows from L2.
template <StorageType storage>
__device__ __forceinline__ void load_moments(LaneState<storage>& state, const StatePointers& p, std::int64_t at) {
  if constexpr (storage == StorageType::fp32) {
    state.rest = __ldcs(reinterpret_cast<const uint4*>(p.rest + at));
    const float4* first = reinterpret_cast<const float4*>(static_cast<const float*>(p.first) + at);
    const float4* second = reinterpret_cast<const float4*>(static_cast<const float*>(p.second) + at);
    state.first[0] = __ldcs(first);
    state.first[1] = __ldcs(first + 1);
    state.second[0] = __ldcs(second);
    state.second[1] = __ldcs(second + 1);
  } else if constexpr (storage == StorageType::bf16) {
    state.first = __ldcs(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.first) + at));
    state.second = __ldcs(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.second) + at));
  } else {
    state.first = __ldcs(reinterpret_cast<const uint2*>(static_cast<const std::uint8_t*>(p.first) + at));
    state.second = __ldcs(reinterpret_cast<const uint2*>(static_cast<const std::uint8_t*>(p.second) + at));
  }
}

__device__ __forceinline__ uint4 load_weight(const StatePointers& p, std::int64_t at) {
  return __ldcs(reinterpret_cast<const uint4*>(p.weight + at));
}

template <StorageType storage>
__device__ __forceinline__ void store_state(const LaneState<storage>& state, const StatePointers& p, std::int64_t at,
                                            bool moments) {
  __stcs(reinterpret_cast<uint4*>(p.weight + at), state.weight);
  if (!moments) return;
  if constexpr (storage == StorageType::fp32) {
    __stcs(reinterpret_cast<uint4*>(p.rest + at), state.rest);
    float4* first = reinterpret_cast<float4*>(static_cast<float*>(p.first) + at);
    float4* second = reinterpret_cast<float4*>(static_cast<float*>(p.second) + at);
    __stcs(first, state.first[0]);
    __stcs(first + 1, state.first[1]);
    __stcs(second, state.second[0]);
    __stcs(second + 1, state.second[1]);
  } else if constexpr (storage == StorageType::bf16) {
    __stcs(reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.first) + at), state.first);
    __stcs(reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.second) + at), state.second);
  } else {
    __stcs(reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(p.first) + at), state.first);
    __stcs(reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(p.second) + at), state.second);
  }
}

// ---- coding

/// Stochastic rounding of finite values; `random` has 16 bits for each.
__device__ __forceinline__ uint4 round8(const float (&value)[8], const Random4& random) {
  std::uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pair[i] = __byte_perm(__float_as_uint(value[2 * i]) + (random.word[i] & 0xffffu),
                          __float_as_uint(value[2 * i + 1]) + (random.word[i] >> 16), 0x7632);
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}
/// Rounds eight values like round8 if some are infinity or NaN: rare, so not inlined.
__device__ __noinline__ inline uint4 round8_any(float a, float b, float c, float d, float e, float f, float g, float h,
                                                Random4 random) {
  const float value[8] = {a, b, c, d, e, f, g, h};
  std::uint32_t pair[4];
  for (int i = 0; i < 4; ++i)
    pair[i] = to_bf16_stochastic(value[2 * i], random.word[i] & 0xffffu).bits |
              static_cast<std::uint32_t>(to_bf16_stochastic(value[2 * i + 1], random.word[i] >> 16).bits) << 16;
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}
__device__ __forceinline__ uint4 round8(const float (&v)[8], const Random4& random, bool finite) {
  return finite ? round8(v, random) : round8_any(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], random);
}

/// code_to_float of codec.hpp for two codes; by the GPU's converter where it has one.
__device__ __forceinline__ void decode2(std::uint32_t codes, float& a, float& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  a = code_to_float(static_cast<std::uint8_t>(codes));
  b = code_to_float(static_cast<std::uint8_t>(codes >> 8));
#else
  std::uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(codes)));
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
      : "=f"(a), "=f"(b)
      : "r"(halves));
#endif
}
__device__ __forceinline__ void decode8(uint2 codes, float (&value)[8]) {
  decode2(codes.x & 0xffffu, value[0], value[1]);
  decode2(codes.x >> 16, value[2], value[3]);
  decode2(codes.y & 0xffffu, value[4], value[5]);
  decode2(codes.y >> 16, value[6], value[7]);
}
/// code_stochastic of codec.hpp, of roots code_stochastic_root, for finite values <= 448 (1 + 2^-21) / inverse.
/// Scaled by 2^-120 more, the bits of an fp32 number are the code's, followed by 20 bits of fraction: for the codes
/// below 2^-6, which have no exponent of their own, because fp32 has none below 2^-126.
constexpr float kCodeScale = 0x1p-120f;
template <bool kRoots>
__device__ __forceinline__ uint2 code8(const float (&value)[8], float scaled_inverse, const Random4& random) {
  std::uint32_t code[8];  // in the highest byte
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    std::uint32_t bits = __float_as_uint(__fmul_rn(value[i], scaled_inverse));
    if (kRoots) bits = max(bits, 1u << 20);
    const std::uint32_t dither = __byte_perm(random.word[i / 2], 0, i % 2 == 0 ? 0x4104 : 0x4324);  // 16 bits << 8
    code[i] = (bits << 4) + dither;
    if (!kRoots) code[i] |= __float_as_uint(value[i]) & 0x80000000u;
  }
  return make_uint2(__byte_perm(__byte_perm(code[0], code[1], 0x0073), __byte_perm(code[2], code[3], 0x0073), 0x5410),
                    __byte_perm(__byte_perm(code[4], code[5], 0x0073), __byte_perm(code[6], code[7], 0x0073), 0x5410));
}
/// Codes eight values like code8 if some are NaN or infinity: rare, so not inlined.
__device__ __noinline__ inline uint2 code8_any(bool roots, float a, float b, float c, float d, float e, float f,
                                               float g, float h, float inverse, Random4 random) {
  const float value[8] = {a, b, c, d, e, f, g, h};
  std::uint32_t code[2] = {0, 0};
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t bits = rounding_bits(random, i);
    const std::uint8_t one =
        roots ? code_stochastic_root(value[i] * inverse, bits) : code_stochastic(value[i] * inverse, bits);
    code[i / 4] |= static_cast<std::uint32_t>(one) << (8 * (i % 4));
  }
  return make_uint2(code[0], code[1]);
}
template <bool kRoots>
__device__ __forceinline__ uint2 code8(const float (&v)[8], float inverse, const Random4& random, bool finite) {
  return finite ? code8<kRoots>(v, inverse * kCodeScale, random)
                : code8_any(kRoots, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], inverse, random);
}

/// False if the eight gradients of every lane are zero: the 256 columns of a block decay.
__device__ __forceinline__ bool has_gradient(const float (&gradient)[8]) {
  std::uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) any |= __float_as_uint(gradient[i]);
  return __any_sync(kAllLanes, (any & 0x7fffffffu) != 0) != 0;
}

__device__ __forceinline__ float direction(float first, float root, const AdamRate& rate) {
  return first * approximate_reciprocal(fmaf(root, rate.denominator, rate.epsilon));
}

/// The direction of the update from moments in units.
__device__ __forceinline__ float unit_direction(float first, float root, const AdamRate& rate) {
  return first * approximate_reciprocal(fmaf(root, rate.unit_denominator, rate.unit_epsilon));
}
/// block_scale and inverse_scale of codec.hpp without their divisions; `largest` of the latter in units.
__device__ __forceinline__ float approximate_scale(float largest) {
  return largest >= 0x1p-100f ? largest * (1.0f / kLargestCode) : 0.0f;
}
__device__ __forceinline__ float approximate_inverse(float scale, float largest) {
  return scale > 0.0f ? kLargestCode * approximate_reciprocal(largest) : 0.0f;
}

/// `state` becomes the state after the step. element: global index of the lane's first column (a multiple of 8). The
/// whole warp calls this together: with 8-bit storage its columns are one block, and lanes past the row's end hold
/// zeros. Returns whether the moments have changed: as codes they may keep, while their scales do not.
template <StorageType storage>
__device__ __forceinline__ bool update8(const AdamRule&, LaneState<storage>& state, const float (&gradient)[8],
                                        const AdamRate& rate, std::uint64_t element) {
  float w[8];
  if constexpr (storage == StorageType::fp32) {
    const std::uint32_t high[4] = {state.weight.x, state.weight.y, state.weight.z, state.weight.w};
    const std::uint32_t rest[4] = {state.rest.x, state.rest.y, state.rest.z, state.rest.w};
    float m[8] = {state.first[0].x, state.first[0].y, state.first[0].z, state.first[0].w,
                  state.first[1].x, state.first[1].y, state.first[1].z, state.first[1].w};
    float v[8] = {state.second[0].x, state.second[0].y, state.second[0].z, state.second[0].w,
                  state.second[1].x, state.second[1].y, state.second[1].z, state.second[1].w};
    std::uint32_t new_high[4], new_rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[2 * i] = __uint_as_float((high[i] << 16) + static_cast<std::uint32_t>(static_cast<std::int32_t>(
                                                       static_cast<std::int16_t>(rest[i] & 0xffffu))));
      w[2 * i + 1] = __uint_as_float((high[i] & 0xffff0000u) +
                                     static_cast<std::uint32_t>(static_cast<std::int32_t>(rest[i]) >> 16));
#pragma unroll
      for (int j = 2 * i; j < 2 * i + 2; ++j) {
        const float q = rate.second_factor * gradient[j];
        m[j] = fmaf(rate.beta1, m[j], rate.first_factor * gradient[j]);
        v[j] = fmaf(rate.beta2, v[j], q * q);
        w[j] = fmaf(w[j], rate.keep, -direction(m[j], approximate_root(v[j]), rate));
      }
      const std::uint32_t a = __float_as_uint(w[2 * i]), b = __float_as_uint(w[2 * i + 1]);
      new_high[i] = __byte_perm(a + 0x8000u, b + 0x8000u, 0x7632);
      new_rest[i] = __byte_perm(a, b, 0x5410);
    }
    state.weight = make_uint4(new_high[0], new_high[1], new_high[2], new_high[3]);
    state.rest = make_uint4(new_rest[0], new_rest[1], new_rest[2], new_rest[3]);
    state.first[0] = make_float4(m[0], m[1], m[2], m[3]);
    state.first[1] = make_float4(m[4], m[5], m[6], m[7]);
    state.second[0] = make_float4(v[0], v[1], v[2], v[3]);
    state.second[1] = make_float4(v[4], v[5], v[6], v[7]);
    return true;
  }

  unpack8(state.weight, w);
  const Random4 weight_random = rounding_random(rate, element / kElementsPerRandom);
  const Random4 second_random = second_moment_random(weight_random);
  // 0 while every result is finite (a moment that is not makes its weight NaN): NaN must survive rounding.
  float poison = 0.0f;
  if constexpr (storage == StorageType::bf16) {
    float m[8], v[8];
    unpack8(state.first, m);
    unpack8(state.second, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float q = rate.second_factor * gradient[i];
      m[i] = fmaf(rate.beta1, m[i], rate.first_factor * gradient[i]);
      v[i] = fmaf(rate.beta2, v[i], q * q);
      w[i] = fmaf(w[i], rate.keep, -direction(m[i], approximate_root(v[i]), rate));
      poison = fmaf(w[i], 0.0f, fmaf(v[i], 0.0f, poison));
    }
    const bool finite = poison == 0.0f;
    state.first = round8(m, first_moment_random(weight_random), finite);
    state.second = round8(v, second_random, finite);
    state.weight = round8(w, weight_random, finite);
  } else if constexpr (storage == StorageType::eight_bit) {
    float m[8], root[8];
    decode8(state.first, m);
    decode8(state.second, root);
    const float first_keep = rate.first_keep * state.first_scale;
    const float root_keep = rate.root_keep * state.second_scale;
    if (!has_gradient(gradient)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        w[i] = fmaf(w[i], rate.keep, -unit_direction(first_keep * m[i], root_keep * root[i], rate));
        poison = fmaf(w[i], 0.0f, poison);
      }
      state.weight = round8(w, weight_random, poison == 0.0f);
      state.first_scale = decayed_scale(state.first_scale, rate.beta1);
      state.second_scale = decayed_scale(state.second_scale, rate.root_beta2);
      return false;
    }
    float largest_first = 0.0f, largest_root = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float r = root_keep * root[i];
      m[i] = fmaf(first_keep, m[i], gradient[i]);
      root[i] = approximate_root(fmaf(r, r, gradient[i] * gradient[i]));
      largest_first = fmaxf(largest_first, fabsf(m[i]));
      largest_root = fmaxf(largest_root, root[i]);
      w[i] = fmaf(w[i], rate.keep, -unit_direction(m[i], root[i], rate));
      poison = fmaf(w[i], 0.0f, poison);
    }
    const bool finite = poison == 0.0f;
    state.weight = round8(w, weight_random, finite);
    largest_first = __uint_as_float(warp_largest(__float_as_uint(largest_first)));
    largest_root = __uint_as_float(warp_largest(__float_as_uint(largest_root)));
    state.first_scale = approximate_scale(largest_first * rate.first_unit);
    state.second_scale = approximate_scale(largest_root * rate.root_unit);
    const float first_inverse = approximate_inverse(state.first_scale, largest_first);
    const float root_inverse = approximate_inverse(state.second_scale, largest_root);
    state.first = code8<false>(m, first_inverse, first_moment_random(weight_random), finite);
    state.second = code8<true>(root, root_inverse, second_random, finite);
  }
  return true;
}

// ---- any width: lane i holds columns i, i + 32, ... of a block

/// Applies `rule` to columns [column, column + count), count <= 256, of a row; gradient[j] belongs to column
/// `column + lane + 32 * j`. Slow and simple: for widths that are not multiples of 8.
template <class Rule>
__device__ inline void update_strided(const Rule& rule, const ParameterRows& p, std::int64_t row, std::int64_t column,
                                      int count, const float (&gradient)[kLaneColumns], const AdamStep& adam,
                                      int lane) {
  const std::int64_t first = row * p.columns + column;
  const std::int64_t block =
      row * p.blocks_per_row() + column / p.segment * p.blocks_per_segment() + column % p.segment / kBlockColumns;
  const bool coded = p.storage == StorageType::eight_bit;
  const float first_scale = coded ? p.first_scale[block] : 0.0f;
  const float second_scale = coded ? p.second_scale[block] : 0.0f;
  float m[kLaneColumns] = {}, root[kLaneColumns] = {};
  float largest_first = 0.0f, largest_root = 0.0f;
  const bool decays = coded && !has_gradient(gradient);
#pragma unroll
  for (int j = 0; j < kLaneColumns; ++j) {
    const int c = lane + kWarp * j;
    if (c >= count) continue;
    const std::int64_t at = first + c;
    const std::uint64_t element = p.global_element(row, column + c);
    const int part = static_cast<int>(element % kElementsPerRandom);
    const Random4 bits = rounding_random(adam, element / kElementsPerRandom);
    std::uint16_t* weight = static_cast<std::uint16_t*>(p.weight) + at;
    if (p.storage == StorageType::fp32) {
      float* first_moment = static_cast<float*>(p.first_moment) + at;
      float* second_moment = static_cast<float*>(p.second_moment) + at;
      float w = bits_float((static_cast<std::uint32_t>(*weight) << 16) +
                           static_cast<std::uint32_t>(static_cast<std::int32_t>(p.weight_rest[at])));
      float a = *first_moment, b = *second_moment;
      rule(adam, gradient[j], w, a, b);
      *weight = static_cast<std::uint16_t>((float_bits(w) + 0x8000u) >> 16);
      p.weight_rest[at] = static_cast<std::int16_t>(float_bits(w) & 0xffffu);
      *first_moment = a;
      *second_moment = b;
    } else if (p.storage == StorageType::bf16) {
      bf16* first_moment = static_cast<bf16*>(p.first_moment) + at;
      bf16* second_moment = static_cast<bf16*>(p.second_moment) + at;
      float w = bf16{*weight}, a = *first_moment, b = *second_moment;
      rule(adam, gradient[j], w, a, b);
      *weight = to_bf16_stochastic(w, rounding_bits(bits, part)).bits;
      *first_moment = to_bf16_stochastic(a, rounding_bits(bits, part ^ kFirstMomentPart));
      *second_moment = to_bf16_stochastic(b, rounding_bits(bits, part ^ kSecondMomentPart));
    } else {
      const float old_root = code_to_float(static_cast<const std::uint8_t*>(p.second_moment)[at]) * second_scale;
      float w = bf16{*weight}, v = old_root * old_root;
      m[j] = code_to_float(static_cast<const std::uint8_t*>(p.first_moment)[at]) * first_scale;
      rule(adam, gradient[j], w, m[j], v);
      root[j] = sqrtf(v);
      *weight = to_bf16_stochastic(w, rounding_bits(bits, part)).bits;
      largest_first = fmaxf(largest_first, fabsf(m[j]));
      largest_root = fmaxf(largest_root, root[j]);
    }
  }
  if (!coded) return;
  if (decays) {
    __syncwarp();  // all lanes have read the scales
    if (lane == 0) {
      p.first_scale[block] = decayed_scale(first_scale, adam.beta1);
      p.second_scale[block] = decayed_scale(second_scale, sqrtf(adam.beta2));
    }
    return;
  }
  largest_first = __uint_as_float(warp_largest(__float_as_uint(largest_first)));
  largest_root = __uint_as_float(warp_largest(__float_as_uint(largest_root)));
  const float new_first_scale = block_scale(largest_first), new_second_scale = block_scale(largest_root);
  const float first_inverse = inverse_scale(new_first_scale), second_inverse = inverse_scale(new_second_scale);
#pragma unroll
  for (int j = 0; j < kLaneColumns; ++j) {
    const int c = lane + kWarp * j;
    if (c >= count) continue;
    const std::uint64_t element = p.global_element(row, column + c);
    const Random4 bits = rounding_random(adam, element / kElementsPerRandom);
    const int part = static_cast<int>(element % kElementsPerRandom);
    static_cast<std::uint8_t*>(p.first_moment)[first + c] =
        code_stochastic(m[j] * first_inverse, rounding_bits(bits, part ^ kFirstMomentPart));
    static_cast<std::uint8_t*>(p.second_moment)[first + c] =
        code_stochastic_root(root[j] * second_inverse, rounding_bits(bits, part ^ kSecondMomentPart));
  }
  if (lane == 0) {
    p.first_scale[block] = new_first_scale;
    p.second_scale[block] = new_second_scale;
  }
}

}  // namespace weft::kernels::cuda
