// SPDX-License-Identifier: Apache-2.0
//
// Privacy loss random variables (arXiv:2106.02848). With P = (1 - q) N(0, sigma^2) + q N(1, sigma^2), the outputs with
// the record, and Q = N(0, sigma^2), those without:
//
//   Y = ln (P/Q)(x), x ~ P              the loss of a step
//   delta(epsilon) = E of max(0, 1 - exp(epsilon - sum of the Y of all steps))
//
// Y is put on a grid of multiples of h in [-L, L], moved by less than h / 2 so that its mean is exact, and composed
// with itself by FFT. h and L follow from the allowed errors of epsilon and delta (theorem 5.5 there):
//
//   h   by Hoeffding's inequality the sum of n losses moves by more than the error of epsilon with a probability below
//       delta_error / 6
//   L   a loss of P(Y > epsilon + c) contributes (1 - e^-c) of it to delta(epsilon): an epsilon by rdp at a small
//       delta, plus c and the error of epsilon, bounds the tails. c = 2 there; a smaller c needs fewer points where
//       epsilon is small
#include <algorithm>
#include <cmath>
#include <complex>
#include <kissfft.hh>
#include <limits>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "privacy/accountant/accountant.hpp"
#include "privacy/accountant/checks.hpp"

namespace weft::privacy {
namespace {

using Complex = std::complex<double>;

/// Bins of 16 bytes in up to four arrays: at most, at most where a larger error of epsilon needs fewer, and of an
/// estimate.
constexpr std::int64_t kMostBins = std::int64_t{1} << 24, kFineBins = 2'500'000, kCoarseBins = std::int64_t{1} << 18;

/// Points (first + i) h, i in [0, size). The size is even and has no prime factor above 5.
struct Grid {
  double h = 0;
  std::int64_t first = 0, size = 0;

  double at(std::int64_t i) const { return static_cast<double>(first + i) * h; }
};

/// The loss Y of a step; q > 0.
class Loss {
 public:
  explicit Loss(const Phase& phase) : q_(phase.sample_rate), sigma_(phase.noise_multiplier) {}

  /// Probabilities of a cell around each point of the grid; they are cut off at its ends.
  std::vector<double> masses(const Grid& grid) const {
    std::vector<double> all(static_cast<std::size_t>(grid.size));
    const double least = grid.at(0), largest = grid.at(grid.size - 1);
    // The difference of the smaller tails: no digits are lost where Y is improbable.
    double low = below(least), high = 0;
    for (std::int64_t i = 0; i < grid.size; ++i) {
      const double begin = std::max(least, grid.at(i) - grid.h / 2), end = std::min(largest, grid.at(i) + grid.h / 2);
      double& mass = all[static_cast<std::size_t>(i)];
      if (begin < 0) {
        const double next = below(end);
        mass = next - std::exchange(low, next);
        if (end >= 0) high = above(end);
      } else {
        const double next = above(end);
        mass = std::exchange(high, next) - next;
        if (next == 0) break;  // and so on
      }
    }
    return all;
  }

  /// Expectation of Y, by the trapezoidal rule in x, which converges exponentially: the integrand is smooth and falls
  /// like a Gaussian. Its singularity next to the real axis is at a distance of pi sigma^2.
  double mean() const {
    constexpr double deviations = 12;
    const double variance = sigma_ * sigma_, h = std::min(sigma_ / 16, variance / 2);
    const double begin = -deviations * sigma_, end = 1 + deviations * sigma_;
    const auto steps = static_cast<std::int64_t>(std::ceil((end - begin) / h));
    double sum = 0;
    for (std::int64_t i = 0; i <= steps; ++i) {
      const double x = begin + static_cast<double>(i) * h;
      const double density =
          (1 - q_) * std::exp(-x * x / (2 * variance)) + q_ * std::exp(-(x - 1) * (x - 1) / (2 * variance));
      sum += density * log_ratio((2 * x - 1) / (2 * variance));
    }
    return sum * h / (sigma_ * std::sqrt(2 * M_PI));
  }

 private:
  /// Logarithm of the density ratio, ln(1 - q + q e^u).
  double log_ratio(double u) const {
    if (q_ == 1) return u;
    return u < 1 ? std::log1p(q_ * std::expm1(u)) : u + std::log(q_) + std::log1p((1 - q_) / q_ * std::exp(-u));
  }
  /// Inverse of log_ratio at t > ln(1 - q).
  double argument(double t) const {
    if (q_ == 1) return t;
    return t < 1 ? std::log1p(std::expm1(t) / q_) : t - std::log(q_) + std::log1p((q_ - 1) * std::exp(-t));
  }
  bool is_possible(double t) const { return q_ == 1 || std::expm1(t) > -q_; }
  double normal_tail(double x) const { return 0.5 * std::erfc(x / (sigma_ * std::sqrt(2.0))); }

  double above(double t) const {
    const double x = argument(t) * sigma_ * sigma_ + 0.5;  // Y > t if and only if it is exceeded
    return q_ * normal_tail(x - 1) + (1 - q_) * normal_tail(x);
  }
  double below(double t) const {
    if (!is_possible(t)) return 0;
    const double x = argument(t) * sigma_ * sigma_ + 0.5;
    return q_ * normal_tail(1 - x) + (1 - q_) * normal_tail(-x);
  }

  double q_, sigma_;
};

/// Half width L of the grid for this error of epsilon; `bound`: an upper bound of epsilon.
double half_width(History history, double delta, double bound, double epsilon_error) {
  const auto n = static_cast<double>(steps_of(history));
  const double beyond = std::clamp(bound, 1e-6, 2.0);
  const double part = kPrvDeltaError * delta * std::expm1(-beyond) / std::expm1(-2.0);
  double largest = std::max(epsilon_error, rdp_epsilon(history, part / 4, rdp_orders()).epsilon);
  for (const Phase& phase : history) {
    const Phase once{phase.sample_rate, phase.noise_multiplier, 1};
    largest = std::max(largest, rdp_epsilon({&once, 1}, part / (8 * n), rdp_orders()).epsilon);
  }
  return beyond + epsilon_error + largest;
}

/// The distance of points for this error of epsilon.
double spacing(History history, double delta, double epsilon_error) {
  const auto n = static_cast<double>(steps_of(history));
  return epsilon_error / std::sqrt(n * std::log(12 / (kPrvDeltaError * delta)) / 2);
}

/// Grid with spacing h; none if it has more than `most` points.
std::optional<Grid> grid_of(double h, double width, std::int64_t most) {
  Grid grid{.h = h};
  const double half = std::ceil(width / grid.h);
  if (!(2 * half + 2 <= static_cast<double>(most))) return std::nullopt;
  grid.first = -static_cast<std::int64_t>(half);
  const auto is_smooth = [](std::int64_t size) {
    for (const std::int64_t factor : {2, 3, 5})
      while (size % factor == 0) size /= factor;
    return size == 1;
  };
  grid.size = -2 * grid.first + 2;
  while (!is_smooth(grid.size)) grid.size += 2;
  return grid;
}

/// Power of a complex number, `exponent` >= 1, |base| <= 1. Powers below the rounding errors of the transforms are 0.
Complex power(Complex base, std::int64_t exponent) {
  constexpr double least_square = 1e-40;
  Complex result = 1;
  for (; exponent > 0; exponent /= 2) {
    if (std::norm(base) < least_square) return 0;
    if (exponent % 2 == 1) result *= base;
    base *= base;
  }
  return result;
}

/// Probabilities of the sum of all losses: that of (first + i) h + shift is mass[i].
struct Composition {
  Grid grid;
  std::vector<double> mass;
  double shift = 0;
};

Composition compose(History history, const Grid& grid) {
  const auto size = static_cast<std::size_t>(grid.size);
  const kissfft<double> forward(size, false);
  std::vector<Complex> values(size), spectrum(size), product(size, Complex(1));
  Composition out{.grid = grid, .mass = std::vector<double>(size)};
  for (const Phase& phase : history) {
    const Loss loss(phase);
    const std::vector<double> masses = loss.masses(grid);
    double total = 0, mean = 0;
    for (std::size_t i = 0; i < size; ++i) {
      total += masses[i];
      mean += masses[i] * grid.at(static_cast<std::int64_t>(i));
    }
    std::transform(masses.begin(), masses.end(), values.begin(), [&](double mass) { return mass / total; });
    // The points and the integral are two ways to the mean: they differ by the rounding to points alone.
    const double moved = loss.mean() - mean / total;
    if (!(std::abs(total - 1) <= 1e-5 && std::abs(moved) <= 0.51 * grid.h))
      throw error(ExitCode::internal,
                  "the accountant prv found a distribution of the privacy loss of total {} whose mean is off by {} (an "
                  "error of the program, at a sample rate of {} and a noise multiplier of {}); take the accountant rdp",
                  total, moved, phase.sample_rate, phase.noise_multiplier);
    out.shift += static_cast<double>(phase.steps) * moved;
    forward.transform(values.data(), spectrum.data());
    // The spectrum of real numbers is symmetric.
    for (std::size_t k = 0; k <= size / 2; ++k) product[k] *= power(spectrum[k], phase.steps);
  }
  for (std::size_t k = size / 2 + 1; k < size; ++k) product[k] = std::conj(product[size - k]);
  kissfft<double>(size, true).transform(product.data(), spectrum.data());
  // Index k of the result is the sum n first + k, modulo the size: k + (n - 1) first on the grid.
  const std::int64_t n = steps_of(history);
  const std::int64_t offset = ((n - 1) % grid.size * grid.first % grid.size + grid.size) % grid.size;
  for (std::int64_t k = 0; k < grid.size; ++k)
    out.mass[static_cast<std::size_t>((k + offset) % grid.size)] =
        spectrum[static_cast<std::size_t>(k)].real() / static_cast<double>(size);
  return out;
}

/// The epsilon at which delta(epsilon) is `delta`; 0 if it is less at 0.
double epsilon_at(const Composition& sum, double delta) {
  const double decay = std::exp(-sum.grid.h), growth = -std::expm1(-sum.grid.h);
  // At epsilon = t, the current point, from above: delta(t), and weighted = sum over t_j >= t of p_j exp(t - t_j).
  double delta_here = 0, weighted = 0;
  for (std::int64_t i = sum.grid.size - 1; i >= 0; --i) {
    const double t = sum.grid.at(i) + sum.shift;
    weighted = weighted * decay + sum.mass[static_cast<std::size_t>(i)];
    // delta at the next point below, if this one is still above epsilon
    const double delta_next = delta_here + weighted * growth;
    if (!(delta_next <= delta) || t - sum.grid.h < 0) {
      // delta(epsilon) = delta_here + weighted (1 - e^(epsilon - t)) is less than `delta` for all epsilon, or:
      if (weighted <= delta - delta_here) return 0;
      const double found = t + std::log1p((delta_here - delta) / weighted);
      return found < 0 ? 0 : found;  // NaN stays NaN
    }
    delta_here = delta_next;
  }
  return 0;
}

/// Bound of the rounding error of a sum of probabilities, from those that came out negative. Errors of the transforms
/// are spread over all points with random signs: four standard deviations of their sum.
double rounding_of(const Composition& sum) {
  double squares = 0;
  for (const double mass : sum.mass)
    if (mass < 0) squares += mass * mass;
  return 4 * std::sqrt(2 * squares);
}

/// The steps that count.
std::vector<Phase> effective_steps(History history) {
  std::vector<Phase> effective;
  for (const Phase& phase : history)
    if (phase.steps > 0 && phase.sample_rate > 0) effective.push_back(phase);
  return effective;
}

}  // namespace

PrvEpsilon prv_epsilon(History history, double delta) {
  const std::vector<Phase> effective = effective_steps(history);
  if (effective.empty()) return {};
  if (is_full_batch(effective)) {
    const double exact = gaussian_epsilon(full_batch_mu(effective), delta);
    return {.lower = exact * (1 - 2e-9), .estimate = exact, .upper = exact};  // found to 1e-9
  }
  const double bound = rdp_epsilon(effective, delta, rdp_orders()).epsilon;
  if (bound == 0) return {};
  double epsilon_error = std::clamp(0.01 * bound, 1e-6, kPrvEpsilonError);
  const double largest_error = std::isfinite(bound) ? std::max(kPrvEpsilonError, 0.001 * bound) : kPrvEpsilonError;
  std::optional<Grid> grid;
  while (!grid) {
    const bool is_last = epsilon_error == largest_error;
    grid = grid_of(spacing(effective, delta, epsilon_error), half_width(effective, delta, bound, epsilon_error),
                   is_last ? kMostBins : kFineBins);
    if (!grid && is_last)
      throw error(ExitCode::usage,
                  "the accountant prv has no result for {} steps at delta = {} with a noise multiplier of {} (the "
                  "distribution of the privacy loss would need more than {} points); take more noise or fewer steps, "
                  "or the accountant rdp",
                  steps_of(effective), delta, effective.back().noise_multiplier, kMostBins);
    if (!grid) epsilon_error = std::min(2 * epsilon_error, largest_error);
  }
  const Composition sum = compose(effective, *grid);
  const double delta_error = kPrvDeltaError * delta;
  if (const double rounding = rounding_of(sum); !(rounding <= delta_error))
    throw error(ExitCode::usage,
                "the accountant prv has no result for {} steps at delta = {} (its rounding errors, {:.1e}, exceed the "
                "allowed {:.1e}); take a larger delta, or the accountant rdp",
                steps_of(effective), delta, rounding, delta_error);
  const double lower = epsilon_at(sum, delta + delta_error) - epsilon_error;
  // Both are upper bounds.
  const PrvEpsilon found{.lower = lower < 0 ? 0 : lower,
                         .estimate = epsilon_at(sum, delta),
                         .upper = std::min(epsilon_at(sum, delta - delta_error) + epsilon_error, bound)};
  require_bound("prv", found.upper, effective, delta);
  if (!(found.lower <= found.upper))
    throw error(
        ExitCode::internal,
        "the accountant prv found epsilon >= {} for {} steps at delta = {}, but rdp at most {} (an error of the "
        "program); take the accountant rdp",
        found.lower, steps_of(effective), delta, found.upper);
  return found;
}

double prv_estimate(History history, double delta) {
  const std::vector<Phase> effective = effective_steps(history);
  if (effective.empty()) return 0;
  if (is_full_batch(effective)) return gaussian_epsilon(full_batch_mu(effective), delta);
  const double bound = rdp_epsilon(effective, delta, rdp_orders()).epsilon;
  if (bound == 0) return 0;
  const double width = half_width(effective, delta, bound, kPrvEpsilonError * std::min(1.0, bound));
  if (!std::isfinite(width)) return width;
  const Grid grid = *grid_of(2 * width / (kCoarseBins - 8), width, kCoarseBins);
  return std::min(epsilon_at(compose(effective, grid), delta), bound);
}

}  // namespace weft::privacy
