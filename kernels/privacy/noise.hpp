// SPDX-License-Identifier: Apache-2.0
//
// Gaussian noise of private training. A number depends on (key, step, parameter, global index of the element) alone:
// the same on any grid of ranks and after any restart, and never used twice. Philox4x32-10 (kernels/random.hpp) whose
// key and half of whose counter are derived from a secret of 256 bits; two uniforms of 53 bits give two normal numbers
// (Box and Muller, 1958) in fp64. The largest magnitude is 8.6 standard deviations.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/random.hpp"

namespace weft::kernels {

/// A secret; never printed.
using NoiseKey = std::array<std::uint32_t, 8>;

/// The generator's key and the upper half of its counter, of one parameter in one step.
struct NoiseStream {
  std::uint64_t key = 0;
  std::uint64_t counter = 0;
};

NoiseStream noise_stream(const NoiseKey&, std::uint64_t step, std::uint64_t parameter);

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

/// The numbers of elements 2 * pair and 2 * pair + 1.
WEFT_HOST_DEVICE inline NormalPair noise_pair(const NoiseStream& stream, std::uint64_t pair) {
  return normal_pair(philox(stream.key, Purpose{}, stream.counter, pair));
}

/// values[i] = scale * (values[i] + deviation * number of element first_element + i), in fp64 and rounded once.
void add_noise(const Execution&, Array<float> values, double deviation, const NoiseStream&, std::uint64_t first_element,
               double scale = 1);

}  // namespace weft::kernels
