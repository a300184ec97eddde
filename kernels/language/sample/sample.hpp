// SPDX-License-Identifier: Apache-2.0
//
// The next token of each sequence, drawn from its logits:
//
//   p = softmax(logits / temperature)  ->  the top_k most probable  ->  of these the fewest, most probable first, whose
//   probabilities reach top_p (Holtzman et al. 2020)  ->  renormalised  ->  inversion of the distribution, by id
//
// Among equal logits the lowest ids are kept. The random number depends on the stream of a sequence and the position of
// the token alone: a draw does not depend on the other rows.
//
// Probabilities are summed as integers in units of 2^-40 of about the largest, so that the order of sums does not
// matter; what is less probable than 2^-40 times the most probable token is never drawn. Without top_k and top_p the
// inversion is in two steps: a block of ids, then an id of the block, whose weight is rounded to a
// multiple of 2^-24 of about the largest of the block.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/language/sample/growing_sequences.hpp"

namespace weft::kernels {

/// Draws the token of position + 1 for each row whose sequence runs (position < end), writes it to `ids` and, for
/// position p, to drawn(row, p - prefix), and adds 1 to the position. Other rows are left as they are. logits [rows, at
/// least vocabulary] fp32, bf16 or fp16. sums: memory, [rows,
/// draw_blocks(vocabulary)].
void sample(const Execution&, const SampleRule&, AnyMatrix logits, Matrix<BlockSum> sums, const GrowingSequences&);

/// Writes -infinity over the logits of the ids that `sample` does not draw with this rule, so that their softmax is the
/// distribution from which it draws; those of the targets [rows] stay in any case: with logits of another rounding a
/// token that was drawn may lie outside. Rows with the target kIgnored (head/cross_entropy.hpp) stay as they are, and
/// so do those whose logits are not finite. temperature > 0; top_k is 0.
void keep_probable(const Execution&, const SampleRule&, AnyMatrix logits, Array<const std::int32_t> targets);

/// Drawn::log_drawn = -loss of each row whose sequence ran at its position of `drawn_at` [rows], that before `sample`.
void note_losses(const Execution&, const GrowingSequences&, Array<const std::int32_t> drawn_at,
                 Array<const float> losses);

}  // namespace weft::kernels
