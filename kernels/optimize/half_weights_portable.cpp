// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimize/half_weights.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {

void weights_to_half(const Execution& execution, const ParameterRows& parameters, Matrix<half> out) {
  const ParameterRows p = parameters;
  const bool wide = p.storage == StorageType::fp32 && p.weight_rest == nullptr;
  for_all(
      execution, "weights_to_half", p.rows * p.columns, KOKKOS_LAMBDA(std::int64_t i) {
        float weight;
        if (wide) {
          weight = static_cast<const float*>(p.weight)[i];
        } else {
          const std::uint32_t high = static_cast<std::uint32_t>(static_cast<const bf16*>(p.weight)[i].bits) << 16;
          const std::int32_t rest = p.weight_rest == nullptr ? 0 : p.weight_rest[i];
          weight = bits_float(high + static_cast<std::uint32_t>(rest));
        }
        out(i / p.columns, i % p.columns) = to_half(weight);
      });
}

}  // namespace weft::kernels
