// SPDX-License-Identifier: Apache-2.0
//
// The Adam rule for one parameter, in fp32, and the random bits with which results are rounded to storage: shared by
// all kernels that update parameters, portable and CUDA.
#pragma once

#include <cmath>

#include "kernels/array.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/random.hpp"

namespace weft::kernels {

/// Replaces w, m and v. `gradient` is not clipped yet (gradient_scale is applied here). The update uses m and v before
/// they are rounded to storage.
WEFT_HOST_DEVICE inline void adam_rule(const AdamStep& adam, float weight_decay, float gradient, float& weight,
                                       float& first_moment, float& second_moment) {
  const float g = adam.gradient_scale * gradient;
  const float m = adam.beta1 * first_moment + adam.first_gain * g;
  const float v = adam.beta2 * second_moment + adam.second_gain * (g * g);
  const float direction = m * adam.first_correction / (sqrtf(v * adam.second_correction) + adam.epsilon);
  weight = weight - adam.learning_rate * (direction + weight_decay * weight);
  first_moment = m;
  second_moment = v;
}

/// Stochastic rounding takes 16 bits per number. Element e (ParameterRows::global_element) of a group of 8 takes 16-bit
/// part e % 8 of the four words of rounding_random(step, e / 8), low half first, for its weight, part (e % 8) ^
/// kSecondMomentPart for its second moment and part (e % 8) ^ kFirstMomentPart for its first: one call serves 24
/// numbers. The three of one element are independent; a part that two elements of a group share rounds different
/// quantities. The bits depend neither on the grid nor on how a kernel divides a row.
constexpr int kElementsPerRandom = 8;
/// Rounds of philox: the fewest with which it passes BigCrush (Salmon et al. 2011, table 2).
constexpr int kRoundingRounds = 7;
constexpr int kFirstMomentPart = 2;
constexpr int kSecondMomentPart = 4;

/// The four words of elements [8 group, 8 group + 8).
WEFT_HOST_DEVICE inline Random4 rounding_random(const AdamStep& adam, std::uint64_t group) {
  return philox<kRoundingRounds>(adam.seed, Purpose::weight_rounding, adam.step, group);
}

WEFT_HOST_DEVICE inline std::uint32_t rounding_bits(const Random4& random, int part) {
  return (random.word[part >> 1] >> (16 * (part & 1))) & 0xffffu;
}

}  // namespace weft::kernels
