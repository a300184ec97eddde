// SPDX-License-Identifier: Apache-2.0
#include "transcoder/features/collection.hpp"

#include <algorithm>
#include <cmath>

namespace weft::transcoder {

int histogram_bin(float activation) {
  // a = m * 2^e with m in [1/2, 1): floor(2 log2 a) = 2e - 2 if m < sqrt(1/2), else 2e - 1.
  int exponent = 0;
  const float mantissa = std::frexp(activation, &exponent);
  const int half_octave = 2 * exponent - (mantissa < 0.70710678f ? 2 : 1);
  return std::clamp(half_octave + kHistogramOrigin, 0, kHistogramBins - 1);
}

std::array<double, kHistogramBins> histogram_edges() {
  std::array<double, kHistogramBins> edges{};
  for (int i = 1; i < kHistogramBins; ++i)
    edges[static_cast<std::size_t>(i)] = std::exp2(0.5 * static_cast<double>(i - kHistogramOrigin));
  return edges;
}

FeatureCollection::FeatureCollection(std::int64_t n_keys, std::int64_t n_top)
    : n_top_(n_top),
      fired_(static_cast<std::size_t>(n_keys), 0),
      histogram_(static_cast<std::size_t>(n_keys * kHistogramBins), 0),
      top_row_(static_cast<std::size_t>(n_keys * n_top), -1),
      sum_(static_cast<std::size_t>(n_keys), 0.0),
      top_value_(static_cast<std::size_t>(n_keys * n_top), 0.0f) {}

void FeatureCollection::add(const SparseRows& rows) {
  for (std::int64_t token = 0; token < rows.n_tokens; ++token)
    for (std::int64_t i = rows.offsets[static_cast<std::size_t>(token)];
         i < rows.offsets[static_cast<std::size_t>(token + 1)]; ++i) {
      const auto key = static_cast<std::int64_t>(rows.key[static_cast<std::size_t>(i)]);
      const float value = rows.value[static_cast<std::size_t>(i)];
      ++fired_[static_cast<std::size_t>(key)];
      sum_[static_cast<std::size_t>(key)] += static_cast<double>(value);
      ++histogram_[static_cast<std::size_t>(key * kHistogramBins + histogram_bin(value))];
      if (n_top_ == 0) continue;
      float* const values = top_value_.data() + key * n_top_;
      std::int64_t* const places = top_row_.data() + key * n_top_;
      // Rows ascend, so an equal value belongs after the kept ones.
      std::int64_t at = n_top_;
      while (at > 0 && value > values[at - 1]) --at;
      if (at == n_top_) continue;
      std::copy_backward(values + at, values + n_top_ - 1, values + n_top_);
      std::copy_backward(places + at, places + n_top_ - 1, places + n_top_);
      values[at] = value;
      places[at] = rows.first_row + token;
    }
}

}  // namespace weft::transcoder
