// SPDX-License-Identifier: Apache-2.0
//
// The rotary table.
#include "kernels/language/rope/query_key.hpp"

#include <algorithm>
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

/// Returns the number of the pair whose wavelength fits `periods` times into the contexts of the training (YaRN).
double pair_of(double periods, double base, const RopeScaling& scaling, std::int64_t columns) {
  return static_cast<double>(columns) *
         std::log(static_cast<double>(scaling.length) / (periods * 2 * std::numbers::pi)) / (2 * std::log(base));
}

std::vector<double> frequencies_of(double base, const RopeScaling& scaling, std::int64_t columns,
                                   std::int64_t longest) {
  const auto width = static_cast<double>(columns);
  if (scaling.method == RopeMethod::dynamic && longest > scaling.length) {
    const double longer = static_cast<double>(longest) / static_cast<double>(scaling.length);
    base *= std::pow(scaling.factor * longer - (scaling.factor - 1), width / (width - 2));
  }
  // Bounds as the published program has them, where the upper one is that of columns, not of pairs.
  double first = 0, last = 0;
  if (scaling.method == RopeMethod::yarn) {
    first = std::max(std::floor(pair_of(scaling.high, base, scaling, columns)), 0.0);
    last = std::min(std::ceil(pair_of(scaling.low, base, scaling, columns)), width - 1);
    if (first == last) last += 0.001;
  }
  std::vector<double> frequencies;
  for (std::int64_t j = 0; j < columns / 2; ++j) {
    const auto pair = static_cast<std::size_t>(j);
    double frequency = std::pow(base, -2.0 * static_cast<double>(j) / width);
    switch (scaling.method) {
      case RopeMethod::bands:
        frequency = scaled(frequency, scaling);
        break;
      case RopeMethod::yarn: {
        const double multiplied = std::clamp((static_cast<double>(j) - first) / (last - first), 0.0, 1.0);
        frequency = frequency / scaling.factor * multiplied + frequency * (1 - multiplied);
        break;
      }
      case RopeMethod::dynamic:
        break;
      case RopeMethod::longrope:
        frequency /= (longest > scaling.length ? scaling.long_factors : scaling.short_factors)[pair];
        break;
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

double amplitude_of(const RopeScaling& scaling) {
  if (scaling.amplitude > 0) return scaling.amplitude;
  if (scaling.method == RopeMethod::yarn) return 0.1 * std::log(scaling.factor) + 1;
  if (scaling.method == RopeMethod::longrope)
    return std::sqrt(1 + std::log(scaling.factor) / std::log(static_cast<double>(scaling.length)));
  return 1;
}

}  // namespace

void rotary_table(double base, const RopeScaling& scaling, std::int64_t columns, std::int64_t longest, float* table) {
  const std::int64_t half = columns / 2;
  const std::vector<double> frequencies = frequencies_of(base, scaling, columns, longest);
  const double amplitude = amplitude_of(scaling);
  for (std::int64_t position = 0; position < longest; ++position)
    for (std::int64_t j = 0; j < half; ++j) {
      const double angle = static_cast<double>(position) * frequencies[static_cast<std::size_t>(j)];
      table[position * columns + j] = static_cast<float>(amplitude * std::cos(angle));
      table[position * columns + half + j] = static_cast<float>(amplitude * std::sin(angle));
    }
}

}  // namespace weft::kernels
