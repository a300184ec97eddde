// SPDX-License-Identifier: Apache-2.0
//
// Sums over an evaluation set, from which NMSE and explained variance follow, and firing counts of features.
#pragma once

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// Per dimension [L * d], fp64, added to over the batches of an evaluation. Targets are taken about `pivot` (any
/// constant near the mean, to keep the subtraction SST = S2 - S1^2 / n well conditioned).
struct DimensionSums {
  Array<double> error;           ///< sum of e = y - y^
  Array<double> squared_error;   ///< sum of e^2
  Array<double> target;          ///< sum of (y - pivot)
  Array<double> squared_target;  ///< sum of (y - pivot)^2
};

/// y (raw targets, as stored) and reconstruction (normalised) [n, L * d]: y^ = reconstruction * spread + mean is the
/// raw-space reconstruction, with spread = 1/scale. Adds to `sums`.
WEFT_KERNEL(accumulate_dimensions,
            void(const Execution&, AnyMatrix y, AnyMatrix reconstruction, Array<const float> mean,
                 Array<const float> spread, Array<const float> pivot, DimensionSums sums));

/// fired[key] += number of hits of the feature: [L * F], for density and dead fraction.
WEFT_KERNEL(accumulate_firing, void(const Execution&, const FeatureHits&, Array<std::int64_t> fired));

/// tokens_since[key] = 0 if the feature fired in the batch, else += tokens (global tokens of the batch). No effect if
/// the step is withheld.
WEFT_KERNEL(advance_clocks, void(const Execution&, const FeatureHits&, std::int64_t tokens, const AdamStep* step,
                                 Array<std::int64_t> tokens_since));

}  // namespace weft::kernels
