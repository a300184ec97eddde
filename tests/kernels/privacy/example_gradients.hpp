// SPDX-License-Identifier: Apache-2.0
//
// The oracle of private training: explicit gradients of every example in float64.
#pragma once

#include <limits>
#include <span>

#include "kernels/privacy/examples.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

/// Examples of the given numbers of rows, after `before` rows of no example.
class TestExamples {
 public:
  explicit TestExamples(const std::vector<std::int64_t>& lengths, std::int64_t before = 0) : offsets_{before} {
    for (const std::int64_t length : lengths) offsets_.push_back(offsets_.back() + length);
    device_ = DeviceArray<std::int64_t>(offsets_);
  }
  kernels::Examples view() const { return {offsets_, device_.array()}; }
  kernels::ExampleSizes sizes() const { return {count(), view().most_rows(), offsets_.back() - offsets_.front()}; }
  std::int64_t count() const { return std::ssize(offsets_) - 1; }
  std::int64_t begin(std::int64_t e) const { return offsets_[e]; }
  std::int64_t end(std::int64_t e) const { return offsets_[e + 1]; }
  /// Rows of a matrix that has them all, and some after.
  std::int64_t rows() const { return offsets_.back() + 3; }

 private:
  std::vector<std::int64_t> offsets_;
  DeviceArray<std::int64_t> device_;
};

using Gradient = std::vector<double>;

inline double squared_norm(const Gradient& gradient) {
  double sum = 0;
  for (const double value : gradient) sum += value * value;
  return sum;
}

/// [out * in] of every example; columns of g beyond `out` are not read.
inline std::vector<Gradient> product_gradients(const std::vector<float>& x, std::int64_t in,
                                               const std::vector<float>& g, std::int64_t out, std::int64_t g_stride,
                                               const TestExamples& examples) {
  std::vector<Gradient> all;
  for (std::int64_t e = 0; e < examples.count(); ++e) {
    Gradient& gradient = all.emplace_back(static_cast<std::size_t>(in * out));
    for (std::int64_t t = examples.begin(e); t < examples.end(e); ++t)
      for (std::int64_t o = 0; o < out; ++o)
        for (std::int64_t i = 0; i < in; ++i)
          gradient[o * in + i] += static_cast<double>(g[t * g_stride + o]) * static_cast<double>(x[t * in + i]);
  }
  return all;
}

/// [columns] of every example: of a bias (without x), of a gain.
inline std::vector<Gradient> column_gradients(const std::vector<float>* x, const std::vector<float>& g,
                                              std::int64_t columns, const std::vector<float>* shift,
                                              const std::vector<float>* scale, const TestExamples& examples) {
  std::vector<Gradient> all;
  for (std::int64_t e = 0; e < examples.count(); ++e) {
    Gradient& gradient = all.emplace_back(static_cast<std::size_t>(columns));
    for (std::int64_t t = examples.begin(e); t < examples.end(e); ++t)
      for (std::int64_t j = 0; j < columns; ++j) {
        double factor = 1;
        if (x != nullptr) factor = (*x)[t * columns + j];
        if (shift != nullptr) factor -= (*shift)[t];
        if (scale != nullptr) factor *= (*scale)[t];
        gradient[j] += factor * static_cast<double>(g[t * columns + j]);
      }
  }
  return all;
}

/// [table * columns] of every example: of the rows [first, first + table) of a table.
inline std::vector<Gradient> lookup_gradients(const std::vector<std::uint32_t>& ids, const std::vector<float>& g,
                                              std::int64_t columns, std::int64_t first, std::int64_t table,
                                              const TestExamples& examples) {
  std::vector<Gradient> all;
  for (std::int64_t e = 0; e < examples.count(); ++e) {
    Gradient& gradient = all.emplace_back(static_cast<std::size_t>(table * columns));
    for (std::int64_t t = examples.begin(e); t < examples.end(e); ++t) {
      const std::int64_t row = static_cast<std::int64_t>(ids[t]) - first;
      if (row < 0 || row >= table) continue;
      for (std::int64_t j = 0; j < columns; ++j) gradient[row * columns + j] += static_cast<double>(g[t * columns + j]);
    }
  }
  return all;
}

/// Largest error relative to the expected values, of values that start with `start`.
inline double largest_relative_error(const std::vector<double>& got, const std::vector<double>& expected,
                                     double start = 0) {
  double worst = got.size() == expected.size() ? 0 : std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
    const double error = std::abs(got[i] - start - expected[i]);
    // An example without rows has a norm of exactly 0.
    const double relative = error == 0 ? 0 : error / std::abs(expected[i]);
    worst = relative <= worst ? worst : relative;  // NaN counts
    if (std::isnan(relative)) return std::numeric_limits<double>::infinity();
  }
  return worst;
}

inline std::vector<double> squared_norms(const std::vector<Gradient>& gradients) {
  std::vector<double> norms;
  for (const Gradient& gradient : gradients) norms.push_back(squared_norm(gradient));
  return norms;
}

/// The largest sum over t, s of |<x_t, x_s> <g_t, g_s>|, relative to the squared norm: what the error of the terms of a
/// Gram sum is multiplied by.
inline double gram_cancellation(const std::vector<float>& x, std::int64_t in, const std::vector<float>& g,
                                std::int64_t out, std::int64_t stride, const TestExamples& examples,
                                const std::vector<double>& norms) {
  const auto product = [](const float* a, const float* b, std::int64_t size) {
    double sum = 0;
    for (std::int64_t i = 0; i < size; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return std::abs(sum);
  };
  double worst = 1;
  for (std::int64_t e = 0; e < examples.count(); ++e) {
    double sum = 0;
    for (std::int64_t t = examples.begin(e); t < examples.end(e); ++t)
      for (std::int64_t s = examples.begin(e); s <= t; ++s)
        sum += (s == t ? 1 : 2) * product(&x[t * in], &x[s * in], in) * product(&g[t * stride], &g[s * stride], out);
    if (sum > 0) worst = std::max(worst, sum / norms[static_cast<std::size_t>(e)]);
  }
  return worst;
}

/// The error of norms that private training allows, relative to float64 on the same stored rows: fp32 sums of fp32 rows
/// round more often than products of 16-bit rows, whose tolerance covers rounding on storage.
inline double norm_tolerance(Scalar type) { return type == Scalar::fp32 ? 1e-5 : 1e-4; }

}  // namespace weft::testing
