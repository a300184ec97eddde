// SPDX-License-Identifier: Apache-2.0
//
// Privacy loss random variables (arXiv:2106.02848), with P and Q of loss_ratio.hpp:
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
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "privacy/accountant/accountant.hpp"
#include "privacy/accountant/checks.hpp"
#include "privacy/accountant/composition.hpp"
#include "privacy/accountant/loss_ratio.hpp"

namespace weft::privacy {
namespace {

/// Points of an estimate.
constexpr std::int64_t kCoarseBins = std::int64_t{1} << 18;

/// Probabilities of a cell around each point of the grid; they are cut off at its ends.
std::vector<double> masses(const LossRatio& loss, const Grid& grid) {
  std::vector<double> all(static_cast<std::size_t>(grid.size));
  const double least = grid.at(0), largest = grid.at(grid.size - 1);
  // The difference of the smaller tails: no digits are lost where Y is improbable.
  double low = loss.p_below(least), high = 0;
  for (std::int64_t i = 0; i < grid.size; ++i) {
    const double begin = std::max(least, grid.at(i) - grid.h / 2), end = std::min(largest, grid.at(i) + grid.h / 2);
    double& mass = all[static_cast<std::size_t>(i)];
    if (begin < 0) {
      const double next = loss.p_below(end);
      mass = next - std::exchange(low, next);
      if (end >= 0) high = loss.p_above(end);
    } else {
      const double next = loss.p_above(end);
      mass = std::exchange(high, next) - next;
      if (next == 0) break;  // and so on
    }
  }
  return all;
}

/// Expectation of Y, by the trapezoidal rule in x, which converges exponentially: the integrand is smooth and falls
/// like a Gaussian. Its singularity next to the real axis is at a distance of pi sigma^2.
double mean_loss(const LossRatio& loss) {
  constexpr double deviations = 12;
  const double variance = loss.sigma * loss.sigma, h = std::min(loss.sigma / 16, variance / 2);
  const double begin = -deviations * loss.sigma, end = 1 + deviations * loss.sigma;
  const auto steps = static_cast<std::int64_t>(std::ceil((end - begin) / h));
  double sum = 0;
  for (std::int64_t i = 0; i <= steps; ++i) {
    const double x = begin + static_cast<double>(i) * h;
    const double density =
        (1 - loss.q) * std::exp(-x * x / (2 * variance)) + loss.q * std::exp(-(x - 1) * (x - 1) / (2 * variance));
    sum += density * loss.log_ratio((2 * x - 1) / (2 * variance));
  }
  return sum * h / (loss.sigma * std::sqrt(2 * M_PI));
}

/// The masses of cells, moved so that the mean is exact.
StepLoss discretise(const Phase& phase, const Grid& grid) {
  const LossRatio loss(phase);
  StepLoss out{.mass = masses(loss, grid)};
  double total = 0, mean = 0;
  for (std::size_t i = 0; i < out.mass.size(); ++i) {
    total += out.mass[i];
    mean += out.mass[i] * grid.at(static_cast<std::int64_t>(i));
  }
  for (double& mass : out.mass) mass /= total;
  // The points and the integral are two ways to the mean: they differ by the rounding to points alone.
  out.shift = mean_loss(loss) - mean / total;
  if (!(std::abs(total - 1) <= 1e-5 && std::abs(out.shift) <= 0.51 * grid.h))
    throw error(ExitCode::internal,
                "the accountant prv found a distribution of the privacy loss of total {} whose mean is off by {} (an "
                "error of the program, at a sample rate of {} and a noise multiplier of {}); take the accountant rdp",
                total, out.shift, phase.sample_rate, phase.noise_multiplier);
  return out;
}

/// The distance of points for this error of epsilon.
double spacing(History history, double delta, double epsilon_error) {
  const auto n = static_cast<double>(steps_of(history));
  return epsilon_error / std::sqrt(n * std::log(12 / (kPrvDeltaError * delta)) / 2);
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
    grid = grid_of(spacing(effective, delta, epsilon_error),
                   half_width(effective, delta, bound, epsilon_error, kPrvDeltaError), is_last ? kMostBins : kFineBins);
    if (!grid && is_last)
      throw error(ExitCode::usage,
                  "the accountant prv has no result for {} steps at delta = {} with a noise multiplier of {} (the "
                  "distribution of the privacy loss would need more than {} points); take more noise or fewer steps, "
                  "or the accountant rdp",
                  steps_of(effective), delta, effective.back().noise_multiplier, kMostBins);
    if (!grid) epsilon_error = std::min(2 * epsilon_error, largest_error);
  }
  const Composition sum = compose(effective, *grid, discretise);
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
  const double width = half_width(effective, delta, bound, kPrvEpsilonError * std::min(1.0, bound), kPrvDeltaError);
  if (!std::isfinite(width)) return width;
  const Grid grid = *grid_of(2 * width / (kCoarseBins - 8), width, kCoarseBins);
  return std::min(epsilon_at(compose(effective, grid, discretise), delta), bound);
}

}  // namespace weft::privacy
