// SPDX-License-Identifier: Apache-2.0
//
// The privacy loss of all steps of a run: distributions on the points of a grid, composed by FFT. The accountants prv
// and pld differ in how they put the loss of a step on the grid.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "privacy/accountant/history.hpp"

namespace weft::privacy {

/// Bins of 16 bytes in up to four arrays: at most, and at most where a larger error of epsilon needs fewer.
constexpr std::int64_t kMostBins = std::int64_t{1} << 24, kFineBins = 2'500'000;

/// Points (first + i) h, i in [0, size). The size is even and has no prime factor above 5.
struct Grid {
  double h = 0;
  std::int64_t first = 0, size = 0;

  double at(std::int64_t i) const;
};
/// Grid with spacing h over [-width, width]; none if it has more than `most` points.
std::optional<Grid> grid_of(double h, double width, std::int64_t most);

/// Half width of the grid for these errors of epsilon and, relative to delta, of delta; `bound`: an upper bound of
/// epsilon. L of prv.cpp.
double half_width(History, double delta, double bound, double epsilon_error, double delta_error);

/// The loss of a step: probabilities of the points, of a loss without bound, and how far all points are moved.
struct StepLoss {
  std::vector<double> mass;
  double infinite = 0, shift = 0;
};
using Discretisation = std::function<StepLoss(const Phase&, const Grid&)>;

/// Probabilities of the sum of all losses: that of (first + i) h + shift is mass[i].
struct Composition {
  Grid grid;
  std::vector<double> mass;
  double infinite = 0, shift = 0;
};
Composition compose(History, const Grid&, const Discretisation&);

/// The epsilon at which delta(epsilon) is `delta`; 0 if it is less at 0; infinite if losses without bound exceed it.
double epsilon_at(const Composition&, double delta);

/// Bound of the rounding error of a sum of probabilities, from those that came out negative. Errors of the transforms
/// are spread over all points with random signs: four standard deviations of their sum.
double rounding_of(const Composition&);

/// The steps that count.
std::vector<Phase> effective_steps(History);

}  // namespace weft::privacy
