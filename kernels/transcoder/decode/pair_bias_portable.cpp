// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "kernels/portable.hpp"
#include "kernels/transcoder/decode/pair_bias.hpp"

namespace weft::kernels {

void extend_update(const Execution& execution, Array<const float> before, std::int64_t d_model, Array<float> after) {
  for_all(
      execution, "extend_update", after.size, KOKKOS_LAMBDA(std::int64_t j) {
        after[j] = before[j] + static_cast<float>(j / d_model + 1) * (after[j] - before[j]);
      });
}

void norm_of_pairs(const Execution& execution, Array<const float> gradient, std::int64_t d_model, Array<float> out) {
  for_all(
      execution, "norm_of_pairs", out.size,
      KOKKOS_LAMBDA(std::int64_t j) { out[j] = sqrtf(static_cast<float>(j / d_model + 1)) * gradient[j]; });
}

}  // namespace weft::kernels
