// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "kernels/portable.hpp"
#include "kernels/privacy/clipped_sums.hpp"

namespace weft::kernels {
namespace {

KOKKOS_FORCEINLINE_FUNCTION float factor_of(double squared_norm, double clip, ClipFunction function, double margin) {
  if (!(squared_norm >= 0) || squared_norm > 1.7976931348623157e308) return 0.0f;
  const double norm = std::sqrt(squared_norm) * (1 + margin);
  if (function == ClipFunction::indicator) return norm <= clip ? 1.0f : 0.0f;
  double factor = function == ClipFunction::abadi ? clip / (norm + 1e-6) : clip / (norm + 0.01);
  if (function == ClipFunction::abadi && factor > 1) factor = 1;
  const float rounded = static_cast<float>(factor);
  if (!is_finite(rounded)) return 0.0f;
  // Positive floats have the order of their bits.
  return static_cast<double>(rounded) > factor ? bits_float(float_bits(rounded) - 1) : rounded;
}

}  // namespace

float clip_factor(double squared_norm, double clip, ClipFunction function, std::int64_t rows) {
  return factor_of(squared_norm, clip, function, norm_margin(rows));
}

void clip_factors(const Execution& execution, Array<const double> squared_norms, double clip, ClipFunction function,
                  std::int64_t rows, Array<float> factors, std::int64_t* clipped) {
  const double margin = norm_margin(rows);
  for_all(
      execution, "clip_factors", factors.size,
      KOKKOS_LAMBDA(std::int64_t b) { factors[b] = factor_of(squared_norms[b], clip, function, margin); });
  if (clipped == nullptr) return;
  for_all(
      execution, "count_clipped", 1, KOKKOS_LAMBDA(std::int64_t) {
        std::int64_t count = 0;
        for (std::int64_t b = 0; b < factors.size; ++b) count += factors[b] < 1.0f;
        *clipped = count;
      });
}

}  // namespace weft::kernels
