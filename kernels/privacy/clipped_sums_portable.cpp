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
                  std::int64_t rows, Array<float> factors, const double* unit) {
  const double margin = norm_margin(rows);
  for_all(
      execution, "clip_factors", factors.size, KOKKOS_LAMBDA(std::int64_t b) {
        factors[b] = factor_of(squared_norms[b], unit == nullptr ? clip : clip * *unit, function, margin);
      });
}

void add_clip_balance(const Execution& execution, Array<const float> factors, double* balance) {
  for_all(
      execution, "add_clip_balance", 1, KOKKOS_LAMBDA(std::int64_t) {
        double sum = *balance;
        for (std::int64_t b = 0; b < factors.size; ++b) sum += factors[b] == 1.0f ? 1 : -1;
        *balance = sum;
      });
}

void adapt_clip(const Execution& execution, const double* balance, const ClipAdaptation& adaptation,
                const NoiseStream& stream, double* clip) {
  for_all(
      execution, "adapt_clip", 1, KOKKOS_LAMBDA(std::int64_t) {
        const double noise = noise_pair(chacha20(stream.key, stream.block(0)), 0).first;
        const double fraction = 0.5 + (0.5 * *balance + adaptation.deviation * noise) / adaptation.expected;
        const double next = *clip * std::exp(-adaptation.rate * (fraction - adaptation.quantile));
        *clip = next < kLeastClip ? kLeastClip : next > kLargestClip ? kLargestClip : next;
      });
}

}  // namespace weft::kernels
