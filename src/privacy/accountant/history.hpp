// SPDX-License-Identifier: Apache-2.0
//
// The steps of a private run, for which accountants compute a guarantee.
#pragma once

#include <cstdint>
#include <span>

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

}  // namespace weft::privacy
