// SPDX-License-Identifier: Apache-2.0
//
// Baseline (parallel.together = false): ranks sum one histogram after the other instead of all at once. Same result bit
// for bit; measures the cost of more collectives.
#pragma once

#include <algorithm>

#include "transcoder/selection/selection.hpp"

namespace weft::transcoder {

inline SumOverRanks sum_in_pieces(SumOverRanks sum) {
  return [sum = std::move(sum)](kernels::Array<std::int64_t> values) {
    for (std::int64_t begin = 0; begin < values.size; begin += kernels::kHistogramBins)
      sum({values.data + begin, std::min<std::int64_t>(values.size - begin, kernels::kHistogramBins)});
  };
}

}  // namespace weft::transcoder
