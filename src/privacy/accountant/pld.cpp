// SPDX-License-Identifier: Apache-2.0
//
// Privacy loss distributions with the pessimistic discretisation that "connects the dots" (Doroshenko et al. 2022,
// arXiv:2207.04380). The curve of a step
//
//   delta(t) = P(Y > t) - e^t Q(Y > t)
//
// is convex in e^t. Of the losses on the points t_j of a grid, those whose curve has the same values there have chords
// in between, and lie above it: no other losses on the grid that bound the step are smaller. Their masses are the
// changes of slope at the points:
//
//   p_j = (delta(t_{j+1}) - delta(t_j) - e^h (delta(t_j) - delta(t_{j-1}))) / (e^h - 1)
//
// What is above the last point has no bound; what is below the first one is moved to it. A record may be added or
// removed: P and Q are exchanged, and the larger epsilon counts. No error of epsilon has to be added to the result.
#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "privacy/accountant/accountant.hpp"
#include "privacy/accountant/checks.hpp"
#include "privacy/accountant/composition.hpp"
#include "privacy/accountant/loss_ratio.hpp"

namespace weft::privacy {
namespace {

/// Allowed for the tails outside the grid, relative to delta.
constexpr double kTails = 1e-5;
/// The largest distance of points where epsilon is at most 10, and their number. n steps move epsilon by about n h^2
/// / 8.
constexpr double kSpacing = 1e-4;
constexpr std::int64_t kBins = 500'000;

enum class Neighbour { removed, added };

StepLoss connect_dots(Neighbour neighbour, const Phase& phase, const Grid& grid) {
  const LossRatio ratio(phase);
  const bool removed = neighbour == Neighbour::removed;
  // delta(t), and for t < 0 the curve of the exchanged pair at -t, with delta(t) = 1 - e^t + e^t w(t): no digits are
  // lost where delta(t) is next to 1 - e^t.
  const auto value = [&](double t) {
    if (t < 0)
      return removed ? ratio.q_below(t) - std::exp(-t) * ratio.p_below(t)
                     : ratio.p_above(-t) - std::exp(-t) * ratio.q_above(-t);
    return removed ? ratio.p_above(t) - std::exp(t) * ratio.q_above(t)
                   : ratio.q_below(-t) - std::exp(t) * ratio.p_below(-t);
  };
  const auto delta = [&](double t) { return t < 0 ? -std::expm1(t) + std::exp(t) * value(t) : value(t); };
  const auto size = static_cast<std::size_t>(grid.size), last = size - 1;
  std::vector<double> values(size);
  for (std::size_t i = 0; i < size; ++i) values[i] = std::max(0.0, value(grid.at(static_cast<std::int64_t>(i))));
  const double growth = std::exp(grid.h), step = std::expm1(grid.h);
  StepLoss out{.mass = std::vector<double>(size), .infinite = values[last]};
  const auto zero = static_cast<std::size_t>(-grid.first);  // the point t = 0
  for (std::size_t j = 0; j < size; ++j) {
    const double t = grid.at(static_cast<std::int64_t>(j));
    double& mass = out.mass[j];
    if (j == 0)
      mass = std::exp(t) * growth * (values[1] - values[0]) / step;
    else if (j == last)
      mass = -growth * (values[j] - values[j - 1]) / step;
    else if (j + 1 < zero)
      mass = std::exp(t) * (growth * (values[j + 1] - values[j]) - (values[j] - values[j - 1])) / step;
    else if (j > zero)
      mass = (values[j + 1] - values[j] - growth * (values[j] - values[j - 1])) / step;
    else {
      const double here = delta(t);
      mass = (delta(t + grid.h) - here - growth * (here - delta(t - grid.h))) / step;
    }
    mass = std::max(0.0, mass);
  }
  return out;
}

}  // namespace

double pld_epsilon(History history, double delta) {
  const std::vector<Phase> effective = effective_steps(history);
  if (effective.empty()) return 0;
  if (is_full_batch(effective)) return gaussian_epsilon(full_batch_mu(effective), delta);
  const double bound = rdp_epsilon(effective, delta, rdp_orders()).epsilon;
  if (bound == 0) return 0;
  const double width = half_width(effective, delta, bound, kSpacing, kTails),
               spacing = kSpacing * std::max(1.0, std::sqrt(bound / 10));
  const std::optional<Grid> grid = grid_of(std::min(spacing, 2 * width / (kBins - 8)), width, kMostBins);
  if (!grid)
    throw error(ExitCode::usage,
                "the accountant pld has no result for {} steps at delta = {} with a noise multiplier of {} (the "
                "distribution of the privacy loss would need more than {} points); take more noise or fewer steps, or "
                "the accountant prv",
                steps_of(effective), delta, effective.back().noise_multiplier, kMostBins);
  double epsilon = 0;
  for (const Neighbour neighbour : {Neighbour::removed, Neighbour::added}) {
    const Composition sum = compose(effective, *grid, [&](const Phase& phase, const Grid& points) {
      return connect_dots(neighbour, phase, points);
    });
    const double rounding = rounding_of(sum);
    if (!(rounding <= 1e-2 * delta))
      throw error(ExitCode::usage,
                  "the accountant pld has no result for {} steps at delta = {} (its rounding errors, {:.1e}, exceed a "
                  "hundredth of it); take a larger delta, or the accountant rdp",
                  steps_of(effective), delta, rounding);
    epsilon = std::max(epsilon, epsilon_at(sum, delta * (1 - kTails) - rounding));
  }
  epsilon = std::min(epsilon, bound);  // both are upper bounds
  require_bound("pld", epsilon, effective, delta);
  return epsilon;
}

}  // namespace weft::privacy
