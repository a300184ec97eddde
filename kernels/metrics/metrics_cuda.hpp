// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/metrics/metrics.hpp"

namespace weft::kernels::cuda {

void accumulate_dimensions(const Execution&, AnyMatrix y, AnyMatrix reconstruction, Array<const float> mean,
                           Array<const float> spread, Array<const float> pivot, DimensionSums sums);
void accumulate_firing(const Execution&, const FeatureHits&, Array<std::int64_t> fired);
void advance_clocks(const Execution&, const FeatureHits&, std::int64_t tokens, const AdamStep* step,
                    Array<std::int64_t> tokens_since);

}  // namespace weft::kernels::cuda
