// SPDX-License-Identifier: Apache-2.0
//
// The gradients of records of a transcoder in float64, one record after the other, written from the formulas alone: no
// code shared with Weft. Parameters and gradients are one vector each: of every layer W_enc [F, d], b_enc [F], theta
// [F] (where there are thresholds), W_dec [F, (L - s) d] or [F, d] (tied per target: that of target s); then b_dec
// [L d].
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace weft::testing {

struct PrivateReference {
  using Values = std::vector<double>;
  enum class Activation { topk, topk_all_layers, relu, jump };
  enum class Decoder { cross_layer, per_layer, tied, tied_target };

  std::int64_t n_layers, d, features;
  Activation activation;
  std::int64_t k;  ///< topk: active of each layer, or of all together
  Decoder decoder = Decoder::cross_layer;
  double bandwidth = 0;  ///< jump: the gradient of ln theta is -(theta / bandwidth) da within the open window
  std::int64_t record_rows = 1;
  Values parameters = {};

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  std::int64_t columns(std::int64_t s) const { return (decoder == Decoder::cross_layer ? n_layers - s : 1) * d; }
  /// True if a feature of layer s writes to column j.
  bool writes(std::int64_t s, std::int64_t j) const { return decoder == Decoder::per_layer ? j / d == s : j / d >= s; }
  /// Index of its weight.
  std::size_t weight(std::int64_t s, std::int64_t f, std::int64_t j) const {
    const std::int64_t row = begin_of(decoder == Decoder::tied_target ? j / d : s).decoder + f * columns(s);
    return at(row + (decoder == Decoder::cross_layer ? j - s * d : j % d));
  }
  std::int64_t size_of(std::int64_t s) const {
    return features * (d + 1 + (activation == Activation::jump ? 1 : 0) + columns(s));
  }
  struct Begin {
    std::int64_t encoder, bias, threshold, decoder;
  };
  Begin begin_of(std::int64_t s) const {
    std::int64_t begin = 0;
    for (std::int64_t r = 0; r < s; ++r) begin += size_of(r);
    const std::int64_t bias = begin + features * d, threshold = bias + features;
    return {begin, bias, threshold, threshold + (activation == Activation::jump ? features : 0)};
  }
  std::int64_t decoder_bias() const { return begin_of(n_layers).encoder; }
  std::int64_t size() const { return decoder_bias() + n_layers * d; }

  /// Gradient of the loss of one record: `rows` rows of normalised x and y, [rows, L * d].
  Values gradient(const double* x, const double* y, std::int64_t rows) const {
    Values sum(at(size()));
    for (std::int64_t n = 0; n < rows; ++n) add_row(x + n * n_layers * d, y + n * n_layers * d, sum);
    return sum;
  }

  /// Sum of the gradients, each scaled to norm `clip` at most (Abadi et al.: c = min(1, C / (|g| + 1e-6))).
  Values clipped_sum(const std::vector<Values>& gradients, double clip) const {
    Values sum(at(size()));
    for (const Values& gradient : gradients) {
      double squares = 0;
      for (const double value : gradient) squares += value * value;
      if (!std::isfinite(squares)) continue;
      const double factor = std::min(1.0, clip / (std::sqrt(squares) + 1e-6));
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += factor * gradient[i];
    }
    return sum;
  }

 private:
  void add_row(const double* x, const double* y, Values& sum) const {
    const std::int64_t width = n_layers * d;
    Values z(at(n_layers * features)), a(z.size()), g(at(width));
    for (std::int64_t s = 0; s < n_layers; ++s)
      for (std::int64_t f = 0; f < features; ++f) {
        double value = parameters[at(begin_of(s).bias + f)];
        for (std::int64_t i = 0; i < d; ++i) value += x[s * d + i] * parameters[at(begin_of(s).encoder + f * d + i)];
        z[at(s * features + f)] = value;
      }
    activate(z, a);
    for (std::int64_t j = 0; j < width; ++j) {
      double value = parameters[at(decoder_bias() + j)];
      for (std::int64_t s = 0; s <= j / d; ++s)
        for (std::int64_t f = 0; f < features && writes(s, j); ++f)
          value += a[at(s * features + f)] * parameters[weight(s, f, j)];
      g[at(j)] = 2.0 / static_cast<double>(record_rows * d) * (value - y[j]);
      sum[at(decoder_bias() + j)] += g[at(j)];
    }
    for (std::int64_t s = 0; s < n_layers; ++s)
      for (std::int64_t f = 0; f < features; ++f) {
        double alpha = 0;
        for (std::int64_t j = 0; j < width; ++j) {
          if (!writes(s, j)) continue;
          alpha += parameters[weight(s, f, j)] * g[at(j)];
          sum[weight(s, f, j)] += a[at(s * features + f)] * g[at(j)];
        }
        const double dz = a[at(s * features + f)] > 0 ? alpha : 0;
        if (activation == Activation::jump) {
          const double value = z[at(s * features + f)], theta = parameters[at(begin_of(s).threshold + f)];
          const double distance = value - theta, half = bandwidth / 2;
          if (std::abs(distance) < half) sum[at(begin_of(s).threshold + f)] -= theta / bandwidth * alpha;
        }
        sum[at(begin_of(s).bias + f)] += dz;
        for (std::int64_t i = 0; i < d; ++i) sum[at(begin_of(s).encoder + f * d + i)] += dz * x[s * d + i];
      }
  }

  void activate(const Values& z, Values& a) const {
    const bool all = activation == Activation::topk_all_layers;
    if (activation == Activation::relu || activation == Activation::jump) {
      for (std::size_t i = 0; i < z.size(); ++i) {
        const std::int64_t key = static_cast<std::int64_t>(i);
        const double cut =
            activation == Activation::relu ? 0 : parameters[at(begin_of(key / features).threshold + key % features)];
        a[i] = z[i] > cut ? z[i] : 0;
      }
      return;
    }
    const std::int64_t group = all ? n_layers * features : features;
    for (std::int64_t begin = 0; begin < n_layers * features; begin += group) {
      std::vector<std::int64_t> order;
      for (std::int64_t i = begin; i < begin + group; ++i) order.push_back(i);
      std::stable_sort(order.begin(), order.end(), [&](std::int64_t i, std::int64_t j) { return z[at(i)] > z[at(j)]; });
      for (std::int64_t i = 0; i < std::min(k, group); ++i) a[at(order[at(i)])] = std::max(0.0, z[at(order[at(i)])]);
    }
  }
};

}  // namespace weft::testing
