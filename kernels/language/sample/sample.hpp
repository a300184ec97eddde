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
// inversion is in two steps: a block of ids (block_sums.hpp), then an id of the block, whose weight is rounded to a
// multiple of 2^-24 of about the largest of the block.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/language/decode/cached_attention.hpp"
#include "kernels/language/sample/block_sums.hpp"

namespace weft::kernels {

/// Key of the random numbers of a sequence: that of position p is philox(seed, sampling, step, index + p).
struct SampleStream {
  std::uint64_t seed = 0, step = 0, index = 0;
};

/// A token that was drawn.
struct Drawn {
  std::uint32_t token = 0;
  float log_probability = 0;  ///< under softmax(logits); NaN: logits of the row are not finite
  float log_drawn = 0;        ///< under the distribution that it was drawn from
};

/// Sequences that grow by one token, where the kernels run.
struct GrowingSequences {
  Array<const CachedSequence> sequences;  ///< [rows]
  Array<const SampleStream> streams;      ///< [rows]
  Array<std::int32_t> positions;          ///< [rows], of the rows whose logits are given
  Array<std::uint32_t> ids;               ///< [rows]
  Matrix<Drawn> drawn;                    ///< [rows, most own positions]
};

/// Memory for the sums of each row over blocks of ids: [rows, draw_blocks(vocabulary)].
struct BlockSums {
  Matrix<BlockSum> of_rows;
  bool formed = false;  ///< by the product that has formed the logits, for the same rule
};

/// For each row whose sequence runs (position < end): draws the token of position + 1, writes it to `ids` and, for
/// position p, to drawn(row, p - prefix), and adds 1 to the position. Other rows are left as they are. logits [rows, at
/// least vocabulary] fp32, bf16 or fp16. Overwrites the sums, unless they are formed.
void sample(const Execution&, const SampleRule&, AnyMatrix logits, const BlockSums&, const GrowingSequences&);

}  // namespace weft::kernels
