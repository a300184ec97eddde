// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/transcoder/encode/quantile_bias.hpp"

namespace weft::kernels {
namespace {

/// Unsigned keys in the order of the values, above 0; 0 for what is not finite.
KOKKOS_FORCEINLINE_FUNCTION std::uint32_t ordered(float value) {
  if (!is_finite(value)) return 0;
  const std::uint32_t bits = float_bits(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
KOKKOS_FORCEINLINE_FUNCTION float value_of(std::uint32_t key) {
  return bits_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

}  // namespace

void bias_of_quantile(const Execution& execution, Matrix<const float> z, std::int64_t active, float cut,
                      Array<float> bias) {
  for_all(
      execution, "bias_of_quantile", bias.size, KOKKOS_LAMBDA(std::int64_t f) {
        // Finds, bit by bit, the largest key that more than `active` values reach.
        std::uint32_t key = 0;
        for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
          const std::uint32_t tried = key | bit;
          std::int64_t reached = 0;
          for (std::int64_t n = 0; n < z.rows; ++n) reached += ordered(z(n, f)) >= tried;
          if (reached > active) key = tried;
        }
        std::uint32_t above = 0xFFFFFFFFu;
        for (std::int64_t n = 0; n < z.rows; ++n) {
          const std::uint32_t other = ordered(z(n, f));
          if (other > key && other < above) above = other;
        }
        const float at = value_of(key);
        // The largest value has none above it.
        bias[f] = key == 0 ? 0.0f : cut - (above == 0xFFFFFFFFu ? at : 0.5f * (at + value_of(above)));
      });
}

}  // namespace weft::kernels
