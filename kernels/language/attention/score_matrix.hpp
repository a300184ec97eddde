// SPDX-License-Identifier: Apache-2.0
//
// The softmax of attention over a matrix of scores in memory: what attention that is not fused computes between its two
// products. Baseline of `weft benchmark`; models are trained with attention.hpp, which has the formulas.
//
// Row (sequence * heads + head) * length + i of a matrix [sequences * heads * length, length] belongs to query i of the
// sequence, column j to key j. fp32, bf16 or fp16, sums in fp32.
#pragma once

#include "kernels/language/attention/attention.hpp"

namespace weft::kernels {

/// scores: q_i . k_j. Overwrites them with p_ij, 0 for keys that row i may not read; log_sum [rows of `scores`]: lse.
void softmax_scores(const Execution&, const Attention&, AnyMatrix scores, Array<float> log_sum);

/// gradient: do_i . v_j. Overwrites it with the gradient of q_i . k_j, the scale included. delta_i is formed from the
/// matrices: sum over j of p_ij (do_i . v_j).
void softmax_scores_backward(const Execution&, const Attention&, AnyMatrix probabilities, Array<const float> log_sum,
                             AnyMatrix gradient);

}  // namespace weft::kernels
