// SPDX-License-Identifier: Apache-2.0
//
// The secret from which a private run draws its noise and its batches: anyone who knows it can remove the noise. It
// is kept in the checkpoint, in a file that its owner alone can read, and is never printed.
#pragma once

#include <cstdint>

#include "kernels/privacy/noise.hpp"
#include "privacy/privacy_settings.hpp"

namespace weft::privacy {

/// Noise that a private step adds to the sum of the clipped gradients, and the divisor of the sum.
struct Noise {
  kernels::NoiseKey key = {};
  double multiplier = 0;       ///< standard deviation / bound of the norms
  double expected = 1;         ///< records of a step: the public expectation, never the number that was drawn
  double count_deviation = 0;  ///< of the noise on the count that adaptive clipping follows
};

/// Draws a key of 256 bits from the operating system, or for KeySource::test of `seed` and `step`, after which the key
/// is used. Throws Error(io) if the system has none.
kernels::NoiseKey new_noise_key(KeySource, std::uint64_t seed, std::uint64_t step = 0);

}  // namespace weft::privacy
