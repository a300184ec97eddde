// SPDX-License-Identifier: Apache-2.0
//
// The mask of dropout: which random bits decide about an element, for portable and CUDA kernels. One call of the
// generator serves 8 adjacent columns with 16 bits each, so the probability is a multiple of 2^-16.
#pragma once

#include "kernels/optimize/adam_rule.hpp"
#include "kernels/random.hpp"

namespace weft::kernels {

constexpr int kColumnsPerMask = 8;
constexpr std::uint32_t kMaskRange = 65536;

struct DropoutRule {
  std::uint32_t kept;  ///< of kMaskRange values of the 16 bits
  float factor;        ///< of a kept element: the mean stays the same
};

inline DropoutRule dropout_rule(float probability) {
  const auto kept = static_cast<std::uint32_t>((1.0 - static_cast<double>(probability)) * kMaskRange + 0.5);
  return {kept, kept == 0 ? 0.0f : static_cast<float>(static_cast<double>(kMaskRange) / kept)};
}

/// Random bits of the dropout mask for columns [8 group, 8 group + 8) of a row. Distinct for sites below 2^16, rows
/// below 2^32 and groups below 2^16.
WEFT_HOST_DEVICE inline Random4 dropout_bits(std::uint64_t seed, std::uint64_t step, std::uint32_t site,
                                             std::int64_t row, std::int64_t group) {
  return philox(seed, Purpose::dropout, step,
                (static_cast<std::uint64_t>(site) << 48) | (static_cast<std::uint64_t>(row) << 16) |
                    static_cast<std::uint64_t>(group));
}

/// Random bits of the dropout mask for the attention probabilities of a row and head, keys [8 group, 8 group + 8). The
/// number of a step takes 40 bits; the layer above it, from 1 on, separates these numbers from those of dropout_bits.
/// Distinct for rows below 2^28, heads and groups below 2^18.
WEFT_HOST_DEVICE inline Random4 attention_dropout_bits(std::uint64_t seed, std::uint64_t step, std::uint32_t layer,
                                                       std::int64_t row, std::int64_t head, std::int64_t group) {
  return philox(seed, Purpose::dropout, step | static_cast<std::uint64_t>(layer + 1) << 40,
                static_cast<std::uint64_t>(row) << 36 | static_cast<std::uint64_t>(head) << 18 |
                    static_cast<std::uint64_t>(group));
}

WEFT_HOST_DEVICE inline float dropout_factor(const DropoutRule& rule, const Random4& random, int column) {
  return rounding_bits(random, column) < rule.kept ? rule.factor : 0.0f;
}

}  // namespace weft::kernels
