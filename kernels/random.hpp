// SPDX-License-Identifier: Apache-2.0
//
// The one source of random numbers: a counter-based generator (Philox4x32-10; Salmon et al., "Parallel random numbers:
// as easy as 1, 2, 3", SC 2011). A number depends on (seed, purpose, step, index) alone, so it is the same on any grid
// of ranks, any launch shape and after any restart. No std:: distribution: those differ between libraries.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/array.hpp"

namespace weft::kernels {

/// Purpose of a random number; separates the streams. Values are part of the file contract: never renumber.
enum class Purpose : std::uint32_t {
  encoder_initial = 1,
  decoder_initial = 2,
  weight_rounding = 3,
  first_moment_rounding = 4,
  second_moment_rounding = 5,
  block_order = 6,
  row_order = 7,
  synthetic = 8,
  test = 9,
  benchmark = 10,
  token_window = 11,
  model_initial = 12,
  dropout = 13,
  sampling = 14,
  segment_order = 15,
};

struct Random4 {
  std::uint32_t word[4];
};

template <int kRounds = 10>
WEFT_HOST_DEVICE inline Random4 philox(std::uint64_t seed, Purpose purpose, std::uint64_t step, std::uint64_t index) {
  // Counter: index (64 bits), step (low 32), purpose mixed with the high half of step. Key: seed.
  std::uint32_t c0 = static_cast<std::uint32_t>(index), c1 = static_cast<std::uint32_t>(index >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(step);
  std::uint32_t c3 = static_cast<std::uint32_t>(step >> 32) ^ (static_cast<std::uint32_t>(purpose) << 24);
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(0xD2511F53u) * c0;
    const std::uint64_t p1 = static_cast<std::uint64_t>(0xCD9E8D57u) * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Uniform in [0, 1), 24 bits.
WEFT_HOST_DEVICE inline float uniform_float(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

/// Uniform in (0, 1), never 0 or 1: 64 bits, rounded to the 53 of a double. The largest ones would round to 1.
WEFT_HOST_DEVICE inline double uniform_double(std::uint32_t high, std::uint32_t low) {
  const std::uint64_t bits = (static_cast<std::uint64_t>(high) << 32) | low;
  const double value = (static_cast<double>(bits) + 0.5) * 0x1p-64;
  return value < 1 ? value : 1 - 0x1p-53;
}

/// Uniform integer in [0, bound), bound >= 1; bias below bound * 2^-64.
WEFT_HOST_DEVICE inline std::uint64_t uniform_below(const Random4& random, std::uint64_t bound) {
  const std::uint64_t bits = (static_cast<std::uint64_t>(random.word[0]) << 32) | random.word[1];
#ifdef __CUDA_ARCH__
  return __umul64hi(bits, bound);
#else
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(bits) * bound) >> 64);
#endif
}

/// Standard normal (Box-Muller on two uniforms). libm's log and cos: same bits only for the same libm.
WEFT_HOST_DEVICE inline double normal(const Random4& random) {
  const double u = uniform_double(random.word[0], random.word[1]);
  const double v = uniform_double(random.word[2], random.word[3]);
  return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586476925 * v);
}

}  // namespace weft::kernels
