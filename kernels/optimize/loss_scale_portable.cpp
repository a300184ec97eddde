// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimize/loss_scale.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {
namespace {

constexpr double kGrowEvery = 2000, kHysteresis = 2, kLargest = 0x1p32;

/// 1 / (1 - beta^t) from 1 - beta, which is exact in fp32 to its last bit; beta is not.
KOKKOS_FORCEINLINE_FUNCTION float correction(float gain, double t) {
  return static_cast<float>(-1.0 / Kokkos::expm1(t * Kokkos::log1p(-static_cast<double>(gain))));
}

}  // namespace

void scale_loss(const Execution& execution, const LossScale* scale, float* factor) {
  for_all(
      execution, "scale_loss", 1,
      KOKKOS_LAMBDA(std::int64_t) { *factor = static_cast<float>(scale->scale * static_cast<double>(*factor)); });
}

void unscale_and_clip(const Execution& execution, const double* squared, double bound, const LossScale* scale,
                      double* norm, AdamStep* step) {
  for_all(
      execution, "unscale_and_clip", 1, KOKKOS_LAMBDA(std::int64_t) {
        if (step->withheld != 0) return;
        const double s = scale != nullptr ? scale->scale : 1.0;
        *norm = Kokkos::sqrt(*squared) / s;
        step->gradient_scale = static_cast<float>((bound > 0 && *norm > bound ? bound / *norm : 1.0) / s);
        if (scale == nullptr || scale->overflows == 0) return;
        const double t = static_cast<double>(step->step) - scale->overflows;
        step->first_correction = correction(step->first_gain, t);
        step->second_correction = correction(step->second_gain, t);
      });
}

void update_loss_scale(const Execution& execution, const StepFlags* flags, LossScale* scale) {
  for_all(
      execution, "update_loss_scale", 1, KOKKOS_LAMBDA(std::int64_t) {
        if (flags->not_finite == 0) {
          scale->clean += 1;
          if (scale->clean < kGrowEvery) return;
          if (scale->scale < kLargest) scale->scale *= 2;
          scale->hysteresis = kHysteresis;
        } else if (is_overflow(*flags, scale)) {
          scale->overflows += 1;
          if (scale->hysteresis > 0) scale->hysteresis -= 1;
          if (scale->hysteresis == 0) scale->scale = scale->scale > 2 ? scale->scale / 2 : 1;
        }
        scale->clean = 0;
      });
}

}  // namespace weft::kernels
