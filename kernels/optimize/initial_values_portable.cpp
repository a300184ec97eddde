// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimize/initial_values.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {

void initial_values(const Execution& execution, const Initial& initial, std::uint64_t seed, std::uint64_t first_element,
                    Array<float> out) {
  for_all(
      execution, "initial_values", out.size, KOKKOS_LAMBDA(std::int64_t i) {
        const std::uint64_t element = first_element + static_cast<std::uint64_t>(i);
        switch (initial.kind) {
          case Initial::Kind::constant:
            out[i] = static_cast<float>(initial.value);
            break;
          case Initial::Kind::uniform: {  // the values of initialise_uniform
            const Random4 random = philox(seed, initial.purpose, 0, element / 4);
            out[i] = static_cast<float>(initial.value) * (2.0f * uniform_float(random.word[element % 4]) - 1.0f);
            break;
          }
          case Initial::Kind::normal:
            out[i] = static_cast<float>(initial.value * normal(philox(seed, initial.purpose, 0, element)));
            break;
        }
      });
}

}  // namespace weft::kernels
