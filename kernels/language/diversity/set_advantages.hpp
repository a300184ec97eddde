// SPDX-License-Identifier: Apache-2.0
//
// Semantic diversity of the answers to each prompt, and the advantages of set_rule.hpp with the distances
//
//   d_ij = 1 - z_i . z_j        z_i = e_i / |e_i|
//
// No distance of a pair is formed. With the centre c of the z of a prompt, y_i = z_i - c, V = sum_i |y_i|^2 and
// W = sum_i R_i y_i:
//
//   D = V / (m - 1)       s_i = (m |y_i|^2 + V) / 2       q_i = (T |y_i|^2 + sum_j R_j |y_j|^2) / 2 - y_i . W
//
// O(m E) for a prompt, and without cancellation where answers are nearly equal. Sums are fp64, in a fixed order.
//
// An embedding of zeros stands for an empty answer, which has no direction: it is not one of the m answers, its s_i and
// A_i are 0.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/language/diversity/set_rule.hpp"

namespace weft::kernels {

/// Answers of prompt p are the rows from p * samples on.
struct AnswerSets {
  std::int64_t prompts = 0, samples = 0;
  AnyMatrix embeddings;         ///< [prompts * samples, E] fp32, bf16 or fp16
  Array<const double> rewards;  ///< [prompts * samples]
};

struct SetAdvantages {
  Array<std::int64_t> counts;  ///< [prompts]: m
  Array<double> diversity;     ///< [prompts]: D over the m answers, in [0, 2]; 0 for fewer than two
  Array<double> objective;     ///< [prompts]: E[f]
  Array<double> distances;     ///< [prompts * samples]: s_i
  Array<double> advantages;    ///< [prompts * samples]: A_i
};

/// Number of elements of the workspace.
constexpr std::int64_t set_advantages_workspace(std::int64_t prompts, std::int64_t samples) {
  return 3 * prompts * samples;
}

/// Computes diversity and advantages in one launch for all prompts. Results of embeddings or rewards that are not
/// finite are not finite. Throws Error(internal) for shapes that do not fit, or a set of fewer than two.
void set_advantages(const Execution&, const SetRule&, const AnswerSets&, Array<double> workspace, const SetAdvantages&);

}  // namespace weft::kernels
