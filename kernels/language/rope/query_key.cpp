// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in query_key_portable.cpp and query_key_cuda.cu; the rotary table.
#include "kernels/language/rope/query_key.hpp"

#include <cmath>
#include <numbers>
#include <vector>

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

namespace {

double scaled(double frequency, const RopeScaling& scaling) {
  const double periods = static_cast<double>(scaling.length) * frequency / (2 * std::numbers::pi);
  if (periods < scaling.low) return frequency / scaling.factor;
  if (periods > scaling.high) return frequency;
  const double share = (periods - scaling.low) / (scaling.high - scaling.low);
  return (1 - share) * frequency / scaling.factor + share * frequency;
}

}  // namespace

void rotary_table(double base, const RopeScaling& scaling, std::int64_t head_size, std::int64_t longest, float* table) {
  const std::int64_t half = head_size / 2;
  std::vector<double> frequencies;
  for (std::int64_t j = 0; j < half; ++j)
    frequencies.push_back(
        scaled(std::pow(base, -2.0 * static_cast<double>(j) / static_cast<double>(head_size)), scaling));
  for (std::int64_t position = 0; position < longest; ++position)
    for (std::int64_t j = 0; j < half; ++j) {
      const double angle = static_cast<double>(position) * frequencies[static_cast<std::size_t>(j)];
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
