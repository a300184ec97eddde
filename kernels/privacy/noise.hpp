// SPDX-License-Identifier: Apache-2.0
//
// Gaussian noise of private training. A number depends on (key, step, parameter, global index of the element) alone:
// the same on any grid of ranks and after any restart, and never used twice. ChaCha20 (chacha20.hpp) with a secret key
// of 256 bits; each block gives eight normal numbers, two from two uniforms of 64 bits (Box and Muller, 1958) in fp64.
// The largest magnitude is 9.5 standard deviations.
//
// clang-format off
// Counter and nonce of a block:  word 12   block, low 32 bits
//                                word 13   block, high 8 bits     | parameter, 24 bits
//                                word 14   step, low 32 bits
//                                word 15   step, high 24 bits     | purpose, 8 bits
// clang-format on
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/privacy/chacha20.hpp"
#include "kernels/random.hpp"

namespace weft::kernels {

/// A secret; never printed.
using NoiseKey = std::array<std::uint32_t, 8>;

/// Purpose for which the key is used. Part of what a resumed run repeats: never renumber.
enum class NoisePurpose : std::uint32_t { gradient = 1, sampling = 2, clip_bound = 3 };

/// All blocks of one parameter in one step.
struct NoiseStream {
  ChachaKey key = {};
  ChachaInput input = {};  ///< of block 0

  WEFT_HOST_DEVICE ChachaInput block(std::uint64_t index) const {
    return {{static_cast<std::uint32_t>(index), input.word[1] | static_cast<std::uint32_t>(index >> 32), input.word[2],
             input.word[3]}};
  }
};

/// Number of values of a block, and of blocks of a stream.
constexpr std::uint64_t kNoiseBlock = 8, kNoiseBlocks = std::uint64_t{1} << 40;

/// Throws Error(internal) if parameter >= 2^24 or step >= 2^56.
NoiseStream noise_stream(const NoiseKey&, std::uint64_t step, std::uint64_t parameter,
                         NoisePurpose = NoisePurpose::gradient);

struct NormalPair {
  double first, second;
};

/// Two independent standard normal numbers.
WEFT_HOST_DEVICE inline NormalPair normal_pair(const Random4& random) {
  const double radius = std::sqrt(-2.0 * std::log(uniform_double(random.word[0], random.word[1])));
  const double turn = uniform_double(random.word[2], random.word[3]);
#if defined(__CUDA_ARCH__)
  double sine, cosine;
  sincospi(2.0 * turn, &sine, &cosine);
  return {radius * cosine, radius * sine};
#else
  constexpr double kTurn = 6.283185307179586476925;
  return {radius * std::cos(kTurn * turn), radius * std::sin(kTurn * turn)};
#endif
}

/// The numbers of elements 8 * block + 2 * pair and the next one, from a block of its stream.
WEFT_HOST_DEVICE inline NormalPair noise_pair(const ChachaBlock& block, int pair) {
  return normal_pair(
      {{block.word[4 * pair], block.word[4 * pair + 1], block.word[4 * pair + 2], block.word[4 * pair + 3]}});
}

/// values[i] = scale * (values[i] + deviation * number of element first_element + i), in fp64 and rounded once.
/// `unit`: if not null, `deviation` is in units of *unit, in memory of the kernels.
void add_noise(const Execution&, Array<float> values, double deviation, const NoiseStream&, std::uint64_t first_element,
               double scale = 1, const double* unit = nullptr);

}  // namespace weft::kernels
