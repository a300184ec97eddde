// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimize/guard.hpp"
#include "kernels/optimize/loss_scale.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {

void guard_step(const Execution& execution, const StepFlags* flags, std::int64_t skip_at_most, StepGuard* guard,
                AdamStep* step, StepOutcome* outcomes, const LossScale* scale) {
  for_all(
      execution, "guard_step", 1, KOKKOS_LAMBDA(std::int64_t) {
        const bool not_finite = flags->not_finite != 0, fault = flags->model_fault != 0;
        const bool overflow = guard->halted == kRuns && !fault && is_overflow(*flags, scale);
        if (guard->halted == kRuns) {
          if (fault)
            guard->halted = kModelFault;
          else if (not_finite && !overflow && guard->skipped < skip_at_most)
            ++guard->skipped;
          else if (not_finite && !overflow)
            guard->halted = kNotFinite;
        }
        step->withheld = not_finite || guard->halted != kRuns ? 1 : 0;
        outcomes[step->step % kOutcomes] = {step->withheld, guard->halted, guard->skipped, overflow ? 1 : 0,
                                            scale != nullptr ? scale->scale : 0.0};
      });
}

void flag_above(const Execution& execution, Array<const double> values, double largest, std::int32_t* flag) {
  for_all(
      execution, "flag_above", values.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (!(values[i] <= largest)) Kokkos::atomic_or(flag, 1);
      });
}

void join_norms(const Execution& execution, const double* rows, bool rows_are_scaled, const double* bias,
                const AdamStep* step, double* squared) {
  for_all(
      execution, "join_norms", 1, KOKKOS_LAMBDA(std::int64_t) {
        if (step->withheld != 0) return;
        const double scale = rows_are_scaled ? static_cast<double>(step->gradient_scale) : 1.0;
        *squared = *rows / (scale * scale) + *bias;
      });
}

void keep_norm(const Execution& execution, const double* squared, const AdamStep* step, double* norm) {
  for_all(
      execution, "keep_norm", 1, KOKKOS_LAMBDA(std::int64_t) {
        if (step->withheld == 0) *norm = Kokkos::sqrt(*squared);
      });
}

void clip_to_norm(const Execution& execution, const double* norm, double bound, AdamStep* step) {
  for_all(
      execution, "clip_to_norm", 1,
      KOKKOS_LAMBDA(std::int64_t) { step->gradient_scale = *norm > bound ? static_cast<float>(bound / *norm) : 1.0f; });
}

}  // namespace weft::kernels
