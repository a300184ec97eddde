// SPDX-License-Identifier: Apache-2.0
//
// How tokens are drawn, and what a draw without top_k and top_p reads in place of all logits of a row: the largest
// logit and the sum of weights of each block of ids. A product that forms logits can leave them (linear/linear.hpp).
#pragma once

#include <cstdint>

#include "kernels/array.hpp"

namespace weft::kernels {

struct SampleRule {
  std::int64_t vocabulary = 0;  ///< at most 2^23; further columns are padding
  float softcap = 0;            ///< of the logits; 0: none
  float temperature = 1;        ///< 0: the most probable token; below 1e-6: 1e-6
  std::int64_t top_k = 0;       ///< 0: all
  double top_p = 1;             ///< in (0, 1]

  bool takes_most_probable() const { return temperature == 0 || top_k == 1; }
  bool keeps_all() const { return (top_k == 0 || top_k >= vocabulary) && top_p == 1; }
  bool draws_by_blocks() const { return takes_most_probable() || keeps_all(); }
};

/// Ids of a block.
constexpr int kDrawBlock = 128;
constexpr std::int64_t draw_blocks(std::int64_t vocabulary) { return (vocabulary + kDrawBlock - 1) / kDrawBlock; }

/// Of the logits of a row whose ids are in [128 block, 128 (block + 1)) and below the vocabulary.
struct BlockSum {
  std::uint32_t weight = 0;  ///< sum of PowerWeight (rule.hpp) at the temperature of the rule
  std::uint32_t plain = 0;   ///< at temperature 1
  float largest = 0;         ///< before the soft cap; NaN if one of them is
};

}  // namespace weft::kernels
