// SPDX-License-Identifier: Apache-2.0
#include "privacy/accountant/composition.hpp"

#include <algorithm>
#include <cmath>
#include <complex>
#include <kissfft.hh>
#include <limits>

#include "privacy/accountant/accountant.hpp"

namespace weft::privacy {
namespace {

using Complex = std::complex<double>;

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

}  // namespace

double Grid::at(std::int64_t i) const { return static_cast<double>(first + i) * h; }

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

double half_width(History history, double delta, double bound, double epsilon_error, double delta_error) {
  const auto n = static_cast<double>(steps_of(history));
  const double beyond = std::clamp(bound, 1e-6, 2.0);
  const double part = delta_error * delta * std::expm1(-beyond) / std::expm1(-2.0);
  double largest = std::max(epsilon_error, rdp_epsilon(history, part / 4, rdp_orders()).epsilon);
  for (const Phase& phase : history) {
    const Phase once{phase.sample_rate, phase.noise_multiplier, 1};
    largest = std::max(largest, rdp_epsilon({&once, 1}, part / (8 * n), rdp_orders()).epsilon);
  }
  return beyond + epsilon_error + largest;
}

Composition compose(History history, const Grid& grid, const Discretisation& of_step) {
  const auto size = static_cast<std::size_t>(grid.size);
  const kissfft<double> forward(size, false);
  std::vector<Complex> values(size), spectrum(size), product(size, Complex(1));
  Composition out{.grid = grid, .mass = std::vector<double>(size)};
  double finite = 0;  // logarithm of the probability of a finite loss
  for (const Phase& phase : history) {
    const StepLoss loss = of_step(phase, grid);
    std::copy(loss.mass.begin(), loss.mass.end(), values.begin());
    out.shift += static_cast<double>(phase.steps) * loss.shift;
    finite += static_cast<double>(phase.steps) * std::log1p(-loss.infinite);
    forward.transform(values.data(), spectrum.data());
    // The spectrum of real numbers is symmetric.
    for (std::size_t k = 0; k <= size / 2; ++k) product[k] *= power(spectrum[k], phase.steps);
  }
  out.infinite = -std::expm1(finite);
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

double epsilon_at(const Composition& sum, double delta) {
  const double decay = std::exp(-sum.grid.h), growth = -std::expm1(-sum.grid.h);
  // At epsilon = t, the current point, from above: delta(t), and weighted = sum over t_j >= t of p_j exp(t - t_j).
  double delta_here = sum.infinite, weighted = 0;
  if (!(delta_here <= delta)) return std::numeric_limits<double>::infinity();
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

double rounding_of(const Composition& sum) {
  double squares = 0;
  for (const double mass : sum.mass)
    if (mass < 0) squares += mass * mass;
  return 4 * std::sqrt(2 * squares);
}

std::vector<Phase> effective_steps(History history) {
  std::vector<Phase> effective;
  for (const Phase& phase : history)
    if (phase.steps > 0 && phase.sample_rate > 0) effective.push_back(phase);
  return effective;
}

}  // namespace weft::privacy
