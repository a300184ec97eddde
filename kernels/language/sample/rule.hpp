// SPDX-License-Identifier: Apache-2.0
//
// What the portable and the CUDA kernel of sample.hpp share: the order of logits, their weights, and which of them are
// kept.
#pragma once

#include <cmath>

#include "kernels/language/exponential.hpp"
#include "kernels/language/sample/sample.hpp"
#include "kernels/random.hpp"

namespace weft::kernels {

/// Ascends with the value. NaN is the largest; no number has key 0.
WEFT_HOST_DEVICE inline std::uint32_t logit_key(float value) {
  const std::uint32_t bits = float_bits(value);
  if (value != value) return 0xffffffffu;
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
WEFT_HOST_DEVICE inline float logit_of_key(std::uint32_t key) {
  return bits_float(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}
/// Of the largest logit: false where the row has NaN or infinity, or nothing but -infinity.
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

/// exp((z - largest) / temperature) in units of 2^-40, of capped logits.
struct LogitWeight {
  float largest, inverse_temperature, softcap;

  WEFT_HOST_DEVICE float capped(float z) const { return softcap > 0 ? softcap * hyperbolic_tangent(z / softcap) : z; }
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

/// The logits that may be drawn: those with keys above `key`, and the first `ties` by id of those with this key.
struct KeptLogits {
  std::uint32_t key = 0;
  std::int64_t ties = 0;
};

/// Weight that top_p asks for, of a total: at least 1, at most all.
WEFT_HOST_DEVICE inline std::uint64_t needed_weight(double top_p, std::uint64_t total) {
  const double needed = ceil(top_p * static_cast<double>(total));
  if (!(needed > 1)) return 1;
  return needed < static_cast<double>(total) ? static_cast<std::uint64_t>(needed) : total;
}

/// Equal logits of weight `each` that are kept beside `above` to reach `needed`; at most `most`.
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

}  // namespace weft::kernels
