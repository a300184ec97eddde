// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimize/rate_tuning.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {

void tune_learning_rate(const Execution& execution, const TuningRule& rule, const double* loss_sum, const float* scale,
                        TuningState* state, AdamStep* step) {
  for_all(
      execution, "tune_learning_rate", 1, KOKKOS_LAMBDA(std::int64_t) {
        if (step->withheld != 0) return;
        const double factor =
            tune(rule, static_cast<std::int64_t>(step->step), *loss_sum * static_cast<double>(*scale), *state);
        step->learning_rate = static_cast<float>(factor * static_cast<double>(step->learning_rate));
      });
}

}  // namespace weft::kernels
