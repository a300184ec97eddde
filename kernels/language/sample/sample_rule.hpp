// SPDX-License-Identifier: Apache-2.0
//
// What the portable and the CUDA kernel of sample.hpp share: the order of logits, their weights, and which of them are
// kept.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/dispatch.hpp"
#include "kernels/language/exponential.hpp"
#include "kernels/language/sample/growing_sequences.hpp"
#include "kernels/random.hpp"

namespace weft::kernels {

/// Key of a logit, which ascends with the value. NaN is the largest; no number has key 0.
WEFT_HOST_DEVICE inline std::uint32_t logit_key(float value) {
  const std::uint32_t bits = float_bits(value);
  if (value != value) return 0xffffffffu;
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
WEFT_HOST_DEVICE inline float logit_of_key(std::uint32_t key) {
  return bits_float(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}
/// Tests the key of the largest logit: false if the row has NaN or infinity, or nothing but -infinity.
WEFT_HOST_DEVICE inline bool is_finite_key(std::uint32_t key) { return key > 0x007fffffu && key < 0xff800000u; }

/// A number from 0 to 1 in units of 2^-40, rounded down.
WEFT_HOST_DEVICE inline std::uint64_t in_units(float x) {
#ifdef __CUDA_ARCH__
  // Conversions to 64 bits are slow. Added to 8 and rounded towards zero, a number leaves its multiple of 2^-20 in the
  // low bits of the mantissa; all these operations are exact.
  const float high = __fadd_rz(x, 8.0f), low = __fmaf_rz(x - (high - 8.0f), 0x1p20f, 8.0f);
  return (static_cast<std::uint64_t>(float_bits(high) - float_bits(8.0f)) << 20) + (float_bits(low) - float_bits(8.0f));
#else
  return static_cast<std::uint64_t>(x * 0x1p40f);
#endif
}

WEFT_HOST_DEVICE inline float capped_logit(float z, float softcap) {
  return softcap > 0 ? softcap * hyperbolic_tangent(z / softcap) : z;
}

/// exp((z - largest) / temperature) in units of 2^-40, of capped logits.
struct LogitWeight {
  float largest, inverse_temperature, softcap;

  WEFT_HOST_DEVICE float capped(float z) const { return capped_logit(z, softcap); }
  WEFT_HOST_DEVICE std::uint64_t of_capped(float z) const {
    const float x = (z - largest) * inverse_temperature;
#ifdef __CUDA_ARCH__
    return in_units(__expf(x));  // error (2 + 1.2 |x|) ulp: small where the weight is not
#else
    return in_units(exponential(x));
#endif
  }
  WEFT_HOST_DEVICE std::uint64_t operator()(float z) const { return of_capped(capped(z)); }
};

/// A rule that draws by blocks, as the kernels need it.
struct BlockRule {
  static constexpr float kPlainScale = 1.44269504f;  ///< log2(e)
  std::int64_t vocabulary;
  float softcap, scale;  ///< scale: log2(e) / temperature
  bool takes_most_probable;

  explicit BlockRule(const SampleRule& rule)
      : vocabulary(rule.vocabulary),
        softcap(rule.softcap),
        scale(rule.takes_most_probable() ? kPlainScale : kPlainScale / std::max(rule.temperature, 1e-6f)),
        takes_most_probable(rule.takes_most_probable()) {}
};

/// 2^(scale z - reference) in units of 2^-24, rounded to nearest, of capped logits. The reference is a whole number, so
/// that sums relative to two references differ by a shift; the weight of `largest` is above 1/2. The sum of a block is
/// below 2^32.
struct PowerWeight {
  static constexpr float kUnits = 24;
  float scale, reference;

  WEFT_HOST_DEVICE PowerWeight(float scale_, float largest) : scale(scale_), reference(ceilf(scale_ * largest)) {}

  /// scale z - origin, rounded once: a large scale or logit loses no digits.
  WEFT_HOST_DEVICE static float exponent(float scale, float z, float origin) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(z, scale, -origin);
#else
    return static_cast<float>(static_cast<double>(z) * static_cast<double>(scale) - static_cast<double>(origin));
#endif
  }
  WEFT_HOST_DEVICE std::uint32_t operator()(float z) const {
    const float x = exponent(scale, z, reference - kUnits), most = x < kUnits ? x : kUnits;
#ifdef __CUDA_ARCH__
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(most));
    return __float2uint_rn(power);
#else
    return static_cast<std::uint32_t>(exponential(most * 0.693147181f) + 0.5f);
#endif
  }
};

/// The sum of a block in units of 2^-40 relative to a reference that is larger by `distance`, rounded down.
WEFT_HOST_DEVICE inline std::uint64_t at_larger_reference(std::uint32_t sum, float distance) {
  return distance < 64 ? (std::uint64_t{sum} << 16) >> static_cast<int>(distance > 0 ? distance : 0.0f) : 0;
}

/// The weights of a row relative to one reference, and the draws with them: a block of ids, then an id of it. All
/// sums are integers.
struct BlockDraw {
  BlockRule rule;
  std::uint32_t most;  ///< key of the largest logit
  PowerWeight weight, plain;

  WEFT_HOST_DEVICE BlockDraw(const BlockRule& rule_, std::uint32_t most_)
      : rule(rule_),
        most(most_),
        weight(rule_.scale, capped_logit(logit_of_key(most_), rule_.softcap)),
        plain(BlockRule::kPlainScale, capped_logit(logit_of_key(most_), rule_.softcap)) {}

  /// False if the logits are not finite, or too large for the temperature.
  WEFT_HOST_DEVICE bool is_finite() const {
    return is_finite_key(most) && fabsf(weight.reference) < bits_float(0x7f800000u);
  }
  /// Difference between the reference of the row and that of a block.
  WEFT_HOST_DEVICE float distance(const PowerWeight& of_row, float largest) const {
    return of_row.reference - PowerWeight(of_row.scale, capped_logit(largest, rule.softcap)).reference;
  }
  WEFT_HOST_DEVICE std::uint64_t plain_of(const BlockSum& block) const {
    return at_larger_reference(block.plain, distance(plain, block.largest));
  }
  WEFT_HOST_DEVICE std::uint64_t weight_of(const BlockSum& block) const {
    if (rule.takes_most_probable) return logit_key(block.largest) == most ? 1 : 0;
    return at_larger_reference(block.weight, distance(weight, block.largest));
  }
  /// True if weight_of equals plain_of.
  WEFT_HOST_DEVICE bool weighs_plainly() const {
    return !rule.takes_most_probable && rule.scale == BlockRule::kPlainScale;
  }
  /// Draws the target of the inversion, below `total`, the sum of weight_of.
  WEFT_HOST_DEVICE std::uint64_t target(const Random4& random, std::uint64_t total) const {
    return rule.takes_most_probable ? 0 : uniform_below(random, total);
  }
  /// Target within a block, below its sum of weight_in, from the rest of the target at its first id: the bits that the
  /// shift to the reference of the row has taken from the sum are random ones.
  WEFT_HOST_DEVICE std::uint32_t target_in(const BlockSum& block, const Random4& random, std::uint64_t rest) const {
    if (rule.takes_most_probable) return 0;
    const float far = distance(weight, block.largest);
    const int shift = static_cast<int>(far > 0 ? far : 0.0f);  // below 48: the block has been drawn
    if (shift <= 16) return static_cast<std::uint32_t>(rest >> (16 - shift));
    return static_cast<std::uint32_t>(rest << (shift - 16)) |
           (random.word[2] & ((std::uint32_t{1} << (shift - 16)) - 1));
  }
  WEFT_HOST_DEVICE std::uint32_t weight_in(const BlockSum& block, float z) const {
    if (rule.takes_most_probable) return logit_key(z) == most ? 1 : 0;
    return PowerWeight(rule.scale, capped_logit(block.largest, rule.softcap))(capped_logit(z, rule.softcap));
  }
  /// The drawn token. total, all: sums of weight_of and plain_of.
  WEFT_HOST_DEVICE Drawn drawn(std::uint32_t id, float z, std::uint64_t total, std::uint64_t all) const {
    const float capped = capped_logit(z, rule.softcap);
    const auto log_of = [&](const PowerWeight& relative, std::uint64_t sum) {
      return (PowerWeight::exponent(relative.scale, capped, relative.reference) -
              log2f(static_cast<float>(sum) * 0x1p-40f)) *
             0.693147181f;
    };
    return {id, log_of(plain, all), rule.takes_most_probable ? 0.0f : log_of(weight, total)};
  }
};

/// The logits that may be drawn: those with keys above `key`, and the first `ties` by id of those with this key.
struct KeptLogits {
  std::uint32_t key = 0;
  std::int64_t ties = 0;
};

/// Weight that top_p requires, of a total: at least 1, at most all.
WEFT_HOST_DEVICE inline std::uint64_t needed_weight(double top_p, std::uint64_t total) {
  const double needed = ceil(top_p * static_cast<double>(total));
  if (!(needed > 1)) return 1;
  return needed < static_cast<double>(total) ? static_cast<std::uint64_t>(needed) : total;
}

/// Equal logits of weight `each` that are kept in addition to `above` to reach `needed`; at most `most`.
WEFT_HOST_DEVICE inline std::int64_t needed_ties(std::uint64_t needed, std::uint64_t above, std::uint64_t each,
                                                 std::int64_t most) {
  if (each == 0 || needed <= above) return most;
  const std::int64_t ties = static_cast<std::int64_t>((needed - above + each - 1) / each);
  return ties < most ? ties : most;
}

/// The random number of the token of a position: `uniform_below` the sum of weights chooses the token.
WEFT_HOST_DEVICE inline Random4 sample_bits(const SampleStream& stream, std::int32_t position) {
  return philox(stream.seed, Purpose::sampling, stream.step, stream.index + static_cast<std::uint64_t>(position));
}

// Implementations that sample.cpp chooses from.

/// Draws with top_k or top_p.
WEFT_KERNEL(sample_kept, void(const Execution&, const SampleRule&, AnyMatrix logits, const GrowingSequences&));
/// -infinity over the logits that are not kept, with top_p alone (keep_probable). targets: [rows].
WEFT_KERNEL(mask_others,
            void(const Execution&, const SampleRule&, AnyMatrix logits, Array<const std::int32_t> targets));
/// Writes the sums of blocks. sums: [rows, draw_blocks(vocabulary)].
WEFT_KERNEL(sum_blocks, void(const Execution&, const BlockRule&, AnyMatrix logits, Matrix<BlockSum> sums));
WEFT_KERNEL(sample_by_blocks,
            void(const Execution&, const BlockRule&, AnyMatrix logits, Matrix<BlockSum> sums, const GrowingSequences&));

}  // namespace weft::kernels
