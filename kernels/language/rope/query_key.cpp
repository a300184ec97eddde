// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in query_key_portable.cpp and query_key_cuda.cu; the rotary table.
#include "kernels/language/rope/query_key.hpp"

#include <cmath>

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::query_key) query_key;
decltype(kernels::query_key_backward) query_key_backward;
}  // namespace portable

namespace cuda {
decltype(kernels::query_key) query_key;
decltype(kernels::query_key_backward) query_key_backward;
}  // namespace cuda

void rotary_table(double base, std::int64_t head_size, std::int64_t longest, float* table) {
  const std::int64_t half = head_size / 2;
  for (std::int64_t position = 0; position < longest; ++position)
    for (std::int64_t j = 0; j < half; ++j) {
      const double angle = static_cast<double>(position) *
                           std::pow(base, -2.0 * static_cast<double>(j) / static_cast<double>(head_size));
      table[position * head_size + j] = static_cast<float>(std::cos(angle));
      table[position * head_size + half + j] = static_cast<float>(std::sin(angle));
    }
}

void query_key(const Execution& execution, const QueryKey& options, AnyMatrix packed, AnyMatrix out,
               Array<float> inverse) {
  dispatch<portable::query_key, cuda::query_key>(execution, options, packed, out, inverse);
}

void query_key_backward(const Execution& execution, const QueryKey& options, AnyMatrix packed,
                        Array<const float> inverse, AnyMatrix gradient, Matrix<float> query_rows,
                        Matrix<float> key_rows, Matrix<float> temperature_rows) {
  dispatch<portable::query_key_backward, cuda::query_key_backward>(execution, options, packed, inverse, gradient,
                                                                   query_rows, key_rows, temperature_rows);
}

}  // namespace weft::kernels
