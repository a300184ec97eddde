// SPDX-License-Identifier: Apache-2.0
//
// Baseline of set_advantages (kernels/language/diversity): the mean distance of the pairs of answers as an array
// library computes it, with a kernel and an array in memory per operation: rows of length 1, differences of all pairs
// by broadcasting, their squares summed over the columns, the mean over pairs.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// Floats of the workspace: normalised rows, differences [prompts, samples, samples, columns], distances.
constexpr std::int64_t unfused_diversity_workspace(std::int64_t prompts, std::int64_t samples, std::int64_t columns) {
  return prompts * samples * columns + prompts * samples * samples * (columns + 1);
}

/// out: [prompts]. embeddings: [prompts * samples, columns]; none is zero. samples: at least 2.
void unfused_diversity(const Execution&, std::int64_t prompts, Matrix<const float> embeddings, Array<float> workspace,
                       Array<float> out);

}  // namespace weft::kernels
