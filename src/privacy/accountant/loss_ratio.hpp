// SPDX-License-Identifier: Apache-2.0
//
// The two distributions of a step and their ratio. P = (1 - q) N(0, sigma^2) + q N(1, sigma^2): the outputs with the
// record; Q = N(0, sigma^2): those without. The loss of an output x is ln (P/Q)(x), which increases with x.
#pragma once

#include <cmath>

#include "privacy/accountant/history.hpp"

namespace weft::privacy {

/// q > 0.
struct LossRatio {
  explicit LossRatio(const Phase& phase) : q(phase.sample_rate), sigma(phase.noise_multiplier) {}

  double q, sigma;

  /// The loss of an output, ln(1 - q + q e^u) with u = (2 x - 1) / (2 sigma^2).
  double log_ratio(double u) const {
    if (q == 1) return u;
    return u < 1 ? std::log1p(q * std::expm1(u)) : u + std::log(q) + std::log1p((1 - q) / q * std::exp(-u));
  }
  /// False if every loss is more than t.
  bool is_possible(double t) const { return q == 1 || std::expm1(t) > -q; }

  // Probabilities, under P and Q, of a loss above and below t.
  double p_above(double t) const {
    if (!is_possible(t)) return 1;
    const double x = output(t);
    return q * tail(x - 1) + (1 - q) * tail(x);
  }
  double p_below(double t) const {
    if (!is_possible(t)) return 0;
    const double x = output(t);
    return q * tail(1 - x) + (1 - q) * tail(-x);
  }
  double q_above(double t) const { return is_possible(t) ? tail(output(t)) : 1; }
  double q_below(double t) const { return is_possible(t) ? tail(-output(t)) : 0; }

 private:
  /// The output with the loss t > ln(1 - q).
  double output(double t) const {
    const double u = q == 1  ? t
                     : t < 1 ? std::log1p(std::expm1(t) / q)
                             : t - std::log(q) + std::log1p((q - 1) * std::exp(-t));
    return u * sigma * sigma + 0.5;
  }
  double tail(double x) const { return 0.5 * std::erfc(x / (sigma * std::sqrt(2.0))); }
};

}  // namespace weft::privacy
