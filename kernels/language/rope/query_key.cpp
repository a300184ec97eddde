// SPDX-License-Identifier: Apache-2.0
//
// The rotary table.
#include "kernels/language/rope/query_key.hpp"

#include <cmath>
#include <numbers>
#include <vector>

namespace weft::kernels {

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

}  // namespace weft::kernels
