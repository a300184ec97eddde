// SPDX-License-Identifier: Apache-2.0
//
// The steps of a private run, for which accountants compute a guarantee.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft::privacy {

/// Steps of one kind.
struct Phase {
  double sample_rate = 0;       ///< q in [0, 1]
  double noise_multiplier = 0;  ///< sigma > 0
  std::int64_t steps = 0;       ///< updates of the model, at least 0

  bool same_kind(const Phase& other) const {
    return sample_rate == other.sample_rate && noise_multiplier == other.noise_multiplier;
  }
};

/// All steps of a run, in order.
using History = std::span<const Phase>;

inline std::int64_t steps_of(History history) {
  std::int64_t steps = 0;
  for (const Phase& phase : history) steps += phase.steps;
  return steps;
}

/// Steps with independent noise that have the guarantee of steps with noise of `bands` bands (correlated_noise.hpp), by
/// the amplification of Choquette-Choo et al. 2023 (arXiv:2306.08153): of b bands, n steps at the rate q have that of
/// ceil(n / b) steps at the rate b q and the same noise multiplier. Conditions: neighbours differ by a record that is
/// added, removed or without a gradient; the matrix C has b bands and columns of norm 1; each record belongs to one of
/// b parts, chosen independently of all other records and constant during the run; step t draws each record of part
/// t mod b with probability b q, independently. A record then enters rows t, …, t + b - 1 of C S alone, which no other
/// of its steps enters: each of its ceil(n / b) steps is a sampled Gaussian mechanism of its own. The noise multiplier
/// must not fall during the run: these rows have the noise of later steps.
inline std::vector<Phase> as_independent(History history, std::int64_t bands) {
  std::vector<Phase> steps(history.begin(), history.end());
  for (Phase& phase : steps) {
    phase.sample_rate *= static_cast<double>(bands);
    phase.steps = (phase.steps + bands - 1) / bands;
  }
  return steps;
}

}  // namespace weft::privacy
