// SPDX-License-Identifier: Apache-2.0
//
// A bitonic sorting network whose comparators all put the larger word at the lower place. Places beyond the last
// word count as the least word and never move: n need not be a power of two, and nothing is stored beyond it.
#pragma once

#include "kernels/array.hpp"

namespace weft::kernels {

struct Comparator {
  int low, high;
};

/// Comparator `pair` (of size / 2) of the merge of runs of `run` / 2 places: distance = run / 2, run / 4, …, 1. The
/// first step of a run compares a place with its mirror image, so that both halves descend.
WEFT_HOST_DEVICE constexpr Comparator comparator(int pair, int run, int distance) {
  const int block = pair / distance * 2 * distance, at = pair % distance;
  return {block + at, 2 * distance == run ? block + run - 1 - at : block + at + distance};
}

}  // namespace weft::kernels
