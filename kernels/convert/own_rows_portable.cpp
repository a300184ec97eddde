// SPDX-License-Identifier: Apache-2.0
#include "kernels/convert/own_rows.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {

void own_rows(const Execution& execution, Matrix<const float> in, Array<const std::int32_t> block, std::int32_t first,
              Matrix<float> out) {
  for_all(
      execution, "own_rows", out.rows * out.columns, KOKKOS_LAMBDA(std::int64_t number) {
        const std::int64_t i = number / out.columns, j = number % out.columns;
        out.row(i)[j] = in.row((block[j] - first) * out.rows + i)[j];
      });
}

}  // namespace weft::kernels
