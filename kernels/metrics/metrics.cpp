// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in metrics_portable.cpp and metrics_cuda.cu.
#include "kernels/metrics/metrics.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::accumulate_dimensions) accumulate_dimensions;
decltype(kernels::accumulate_firing) accumulate_firing;
decltype(kernels::advance_clocks) advance_clocks;
}  // namespace portable

namespace cuda {
decltype(kernels::accumulate_dimensions) accumulate_dimensions;
decltype(kernels::accumulate_firing) accumulate_firing;
decltype(kernels::advance_clocks) advance_clocks;
}  // namespace cuda

void accumulate_dimensions(const Execution& execution, AnyMatrix y, AnyMatrix reconstruction, Array<const float> mean,
                           Array<const float> spread, Array<const float> pivot, DimensionSums sums) {
  dispatch<portable::accumulate_dimensions, cuda::accumulate_dimensions>(execution, y, reconstruction, mean, spread,
                                                                         pivot, sums);
}

void accumulate_firing(const Execution& execution, const FeatureHits& hits, Array<std::int64_t> fired) {
  dispatch<portable::accumulate_firing, cuda::accumulate_firing>(execution, hits, fired);
}

void advance_clocks(const Execution& execution, const FeatureHits& hits, std::int64_t tokens, const AdamStep* step,
                    Array<std::int64_t> tokens_since) {
  dispatch<portable::advance_clocks, cuda::advance_clocks>(execution, hits, tokens, step, tokens_since);
}

}  // namespace weft::kernels
