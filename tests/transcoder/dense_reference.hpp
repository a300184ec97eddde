// SPDX-License-Identifier: Apache-2.0
//
// A cross-layer transcoder in float64, dense and slow, written from the formulas alone: no code shared with Weft. Whole
// batch, all features, one process.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace weft::testing {

struct DenseReference {
  std::int64_t n_layers, d, n_features;
  double k;
  bool all_layers;
  bool cross_layer, skip, tied = false;
  double learning_rate, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0, clip = 0;

  using Values = std::vector<double>;
  struct Parameter {
    Values w, m, v, g;
    void resize(std::int64_t n) { w.assign(static_cast<std::size_t>(n), 0), m = v = g = w; }
  };
  std::vector<Parameter> encoder, encoder_bias, decoder;  // by layer
  Parameter decoder_bias;
  std::vector<Parameter> skip_weight;  // by layer, [d, d]; empty without
  // JumpReLU instead of BatchTopK, where there are thresholds (by layer). Gradient -(theta / bandwidth) da within the
  // open window of that width: of ln theta ("anthropic"), or of theta with the half-open window and the encoder's
  // gradient on all z >= 0 ("goreg").
  std::vector<Parameter> threshold;
  double bandwidth = 0;
  bool goreg = false;
  // sparsity/N sum tanh(scale a nu), rising linearly over `ramp` steps, + preactivation/N sum q(z); nu: norm of a
  // decoder row, q = relu(theta - z) nu or, with `negative`, relu(-z).
  double sparsity = 0, scale = 0, ramp = 1, preactivation = 0;
  bool negative = false;
  // AuxK: features silent for `window` tokens, the `auxk_features` largest per token and layer, reconstruct what is
  // left.
  double auxk = 0;
  std::int64_t auxk_features = 0, window = 1;
  std::vector<std::int64_t> silent;  // tokens since it fired, by layer and feature
  double auxiliary_loss = 0;
  int t = 0;
  double last_norm = 0;

  void allocate() {
    encoder.resize(static_cast<std::size_t>(n_layers));
    encoder_bias = decoder = encoder;
    for (std::int64_t s = 0; s < n_layers; ++s) {
      encoder[at(s)].resize(n_features * d);
      encoder_bias[at(s)].resize(n_features);
      decoder[at(s)].resize(n_features * (tied ? 1 : targets(s)) * d);
      if (skip) skip_weight.emplace_back().resize(d * d);
    }
    decoder_bias.resize(n_layers * d);
  }

  /// Layers that a feature of source layer s writes to, from s on.
  std::int64_t targets(std::int64_t s) const { return cross_layer ? n_layers - s : 1; }

  /// Where a decoder has element i, of all targets one after the other, of feature f.
  std::size_t element(std::int64_t s, std::int64_t f, std::int64_t i) const {
    return tied ? at(f * d + i % d) : at(f * targets(s) * d + i);
  }

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  /// One step on normalised x and y, [n_tokens, L * d]; returns the loss before it.
  double step(const Values& x, const Values& y, std::int64_t n_tokens) {
    const std::int64_t width = n_layers * d;
    // Pre-activations [n, s, f].
    Values z(at(n_tokens * n_layers * n_features));
    for (std::int64_t n = 0; n < n_tokens; ++n)
      for (std::int64_t s = 0; s < n_layers; ++s)
        for (std::int64_t f = 0; f < n_features; ++f) {
          double sum = encoder_bias[at(s)].w[at(f)];
          for (std::int64_t i = 0; i < d; ++i) sum += x[at(n * width + s * d + i)] * encoder[at(s)].w[at(f * d + i)];
          z[at((n * n_layers + s) * n_features + f)] = sum;
        }
    const auto theta_of = [&](std::size_t i) {
      const std::int64_t j = static_cast<std::int64_t>(i);
      return threshold[at(j / n_features % n_layers)].w[at(j % n_features)];
    };
    // BatchTopK by a full sort; entry order is (token, layer, feature), so a stable sort has the tie rule.
    Values a(z.size(), 0.0);
    const auto keep = [&](std::vector<std::size_t> entries, std::int64_t budget) {
      std::stable_sort(entries.begin(), entries.end(), [&](std::size_t i, std::size_t j) { return z[i] > z[j]; });
      for (std::size_t i = 0; i < entries.size() && i < at(budget); ++i)
        if (z[entries[i]] > 0) a[entries[i]] = z[entries[i]];
    };
    std::vector<std::size_t> all;
    for (std::int64_t s = 0; s < n_layers; ++s) {
      std::vector<std::size_t> entries;
      for (std::int64_t n = 0; n < n_tokens; ++n)
        for (std::int64_t f = 0; f < n_features; ++f) entries.push_back(at((n * n_layers + s) * n_features + f));
      if (!all_layers && threshold.empty()) keep(entries, std::llround(k * static_cast<double>(n_tokens)));
    }
    for (std::size_t i = 0; i < z.size(); ++i) all.push_back(i);
    if (all_layers && threshold.empty()) keep(all, std::llround(k * static_cast<double>(n_tokens * n_layers)));
    if (!threshold.empty())
      for (const std::size_t i : all) a[i] = z[i] > theta_of(i) ? z[i] : 0;

    // Reconstruction, loss, gradient rows.
    Values g(at(n_tokens * width));
    double loss = 0;
    for (std::int64_t n = 0; n < n_tokens; ++n)
      for (std::int64_t t_layer = 0; t_layer < n_layers; ++t_layer)
        for (std::int64_t i = 0; i < d; ++i) {
          double sum = decoder_bias.w[at(t_layer * d + i)];
          for (std::int64_t s = cross_layer ? 0 : t_layer; s <= t_layer; ++s)
            for (std::int64_t f = 0; f < n_features; ++f) {
              const double activation = a[at((n * n_layers + s) * n_features + f)];
              if (activation != 0) sum += activation * decoder[at(s)].w[element(s, f, (t_layer - s) * d + i)];
            }
          for (std::int64_t j = 0; skip && j < d; ++j)
            sum += skip_weight[at(t_layer)].w[at(i * d + j)] * x[at(n * width + t_layer * d + j)];
          const double e = sum - y[at(n * width + t_layer * d + i)];
          loss += e * e / static_cast<double>(n_tokens * d);
          g[at(n * width + t_layer * d + i)] = 2 * e / static_cast<double>(n_tokens * d);
        }

    // Gradients.
    each([](Parameter& p) { std::fill(p.g.begin(), p.g.end(), 0.0); });
    for (std::int64_t n = 0; n < n_tokens; ++n) {
      for (std::int64_t i = 0; i < width; ++i) decoder_bias.g[at(i)] += g[at(n * width + i)];
      for (std::int64_t i = 0; skip && i < width; ++i)
        for (std::int64_t j = 0; j < d; ++j)
          skip_weight[at(i / d)].g[at(i % d * d + j)] += g[at(n * width + i)] * x[at(n * width + i / d * d + j)];
      for (std::int64_t s = 0; s < n_layers; ++s)
        for (std::int64_t f = 0; f < n_features; ++f) {
          const std::size_t entry = at((n * n_layers + s) * n_features + f);
          const double activation = a[entry];
          if (activation == 0 && threshold.empty()) continue;
          const std::int64_t strip = targets(s) * d;
          double da = 0, squares = 0;
          for (std::int64_t i = 0; i < strip; ++i) {
            const double row = g[at(n * width + s * d + i)];
            da += row * decoder[at(s)].w[element(s, f, i)];
            decoder[at(s)].g[element(s, f, i)] += activation * row;
          }
          const std::int64_t width_of_row = tied ? d : strip;
          for (std::int64_t i = 0; i < width_of_row; ++i) squares += std::pow(decoder[at(s)].w[element(s, f, i)], 2);
          const double norm = std::sqrt(squares), tokens = static_cast<double>(n_tokens);
          const double tangent = std::tanh(scale * activation * norm);
          const double slope = sparsity / tokens * std::min(1.0, (t + 1) / ramp) * scale * (1 - tangent * tangent);
          da += slope * norm;
          double of_norm = slope * activation, dz = 0;
          if (preactivation > 0 && negative && z[entry] < 0) dz -= preactivation / tokens;
          if (preactivation > 0 && !negative && z[entry] < theta_of(entry)) {
            dz -= preactivation / tokens * norm;
            of_norm += preactivation / tokens * (theta_of(entry) - z[entry]);
            threshold[at(s)].g[at(f)] += preactivation / tokens * norm * (goreg ? 1 : theta_of(entry));
          }
          for (std::int64_t i = 0; i < width_of_row; ++i)
            decoder[at(s)].g[element(s, f, i)] += of_norm * decoder[at(s)].w[element(s, f, i)] / norm;
          if (!threshold.empty()) {
            const double theta = theta_of(entry), distance = z[entry] - theta;
            if (distance > -bandwidth / 2 && (distance < bandwidth / 2 || (goreg && distance == bandwidth / 2)))
              threshold[at(s)].g[at(f)] -= theta / bandwidth * da;
            if (goreg ? z[entry] < 0 : activation == 0) da = 0;
          }
          da += dz;
          encoder_bias[at(s)].g[at(f)] += da;
          for (std::int64_t i = 0; i < d; ++i) encoder[at(s)].g[at(f * d + i)] += da * x[at(n * width + s * d + i)];
        }
    }

    auxiliary_loss = 0;
    silent.resize(at(n_layers * n_features), 0);
    for (std::int64_t n = 0; auxk > 0 && n < n_tokens; ++n) {
      Values dead(at(n_layers * n_features), 0.0), u(at(width));
      for (std::int64_t s = 0; s < n_layers; ++s) {
        std::vector<std::int64_t> candidates;
        const double* const of = &z[at((n * n_layers + s) * n_features)];
        for (std::int64_t f = 0; f < n_features; ++f)
          if (silent[at(s * n_features + f)] >= window && of[f] > 0) candidates.push_back(f);
        std::stable_sort(candidates.begin(), candidates.end(), [&](auto i, auto j) { return of[i] > of[j]; });
        for (std::size_t i = 0; i < candidates.size() && i < at(auxk_features); ++i)
          dead[at(s * n_features + candidates[i])] = of[candidates[i]];
      }
      for (std::int64_t i = 0; i < width; ++i) {
        double sum = 0;
        for (std::int64_t s = cross_layer ? 0 : i / d; s <= i / d; ++s)
          for (std::int64_t f = 0; f < n_features; ++f)
            sum += dead[at(s * n_features + f)] * decoder[at(s)].w[element(s, f, i - s * d)];
        // g = 2 (y^ - y) / (N d) holds the error.
        u[at(i)] = auxk * (2 * sum / static_cast<double>(n_tokens * d) + g[at(n * width + i)]);
        auxiliary_loss += u[at(i)] * u[at(i)] * static_cast<double>(n_tokens * d) / (4 * auxk);
      }
      for (std::int64_t s = 0; s < n_layers; ++s)
        for (std::int64_t f = 0; f < n_features; ++f) {
          const double activation = dead[at(s * n_features + f)];
          if (activation == 0) continue;
          const std::int64_t strip = targets(s) * d;
          double da = 0;
          for (std::int64_t i = 0; i < strip; ++i) {
            da += u[at(s * d + i)] * decoder[at(s)].w[element(s, f, i)];
            decoder[at(s)].g[element(s, f, i)] += activation * u[at(s * d + i)];
          }
          encoder_bias[at(s)].g[at(f)] += da;
          for (std::int64_t i = 0; i < d; ++i) encoder[at(s)].g[at(f * d + i)] += da * x[at(n * width + s * d + i)];
        }
    }
    for (std::size_t f = 0; f < silent.size(); ++f) {
      bool fired = false;
      for (std::int64_t n = 0; n < n_tokens; ++n) fired = fired || a[at(n) * silent.size() + f] != 0;
      silent[f] = fired ? 0 : silent[f] + n_tokens;
    }

    // Clip by the exact global norm, Adam, decoupled decay on weights.
    double squared = 0;
    each([&](Parameter& p) {
      for (const double value : p.g) squared += value * value;
    });
    last_norm = std::sqrt(squared);
    const double scale = clip > 0 && last_norm > clip ? clip / last_norm : 1;
    ++t;
    const double c1 = 1 / (1 - std::pow(beta1, t)), c2 = 1 / (1 - std::pow(beta2, t));
    const auto update = [&](Parameter& p, double decay) {
      for (std::size_t i = 0; i < p.w.size(); ++i) {
        const double gradient = scale * p.g[i];
        p.m[i] = beta1 * p.m[i] + (1 - beta1) * gradient;
        p.v[i] = beta2 * p.v[i] + (1 - beta2) * gradient * gradient;
        p.w[i] -= learning_rate * (p.m[i] * c1 / (std::sqrt(p.v[i] * c2) + epsilon) + decay * p.w[i]);
      }
    };
    for (std::int64_t s = 0; s < n_layers; ++s) {
      update(encoder[at(s)], weight_decay);
      update(decoder[at(s)], weight_decay);
      update(encoder_bias[at(s)], 0);
    }
    update(decoder_bias, 0);
    for (Parameter& p : skip_weight) update(p, weight_decay);
    for (Parameter& p : threshold) {
      const Values before = p.w;
      if (!goreg) std::fill(p.w.begin(), p.w.end(), 0.0);
      update(p, 0);
      for (std::size_t i = 0; i < p.w.size() && !goreg; ++i) p.w[i] = before[i] * std::exp(p.w[i]);
    }
    return loss;
  }

  template <class Function>
  void each(Function&& function) {
    for (std::int64_t s = 0; s < n_layers; ++s) {
      function(encoder[at(s)]);
      function(encoder_bias[at(s)]);
      function(decoder[at(s)]);
    }
    function(decoder_bias);
    for (Parameter& p : skip_weight) function(p);
    for (Parameter& p : threshold) function(p);
  }
};

}  // namespace weft::testing
