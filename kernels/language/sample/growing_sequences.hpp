// SPDX-License-Identifier: Apache-2.0
//
// What sample.hpp draws: the rule, the sequences that grow by the drawn tokens, and sums over blocks of ids.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/language/decode/cached_attention.hpp"

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

/// Number of ids of a block.
constexpr int kDrawBlock = 128;
constexpr std::int64_t draw_blocks(std::int64_t vocabulary) { return (vocabulary + kDrawBlock - 1) / kDrawBlock; }

/// Sums over the logits of a row whose ids are in [128 block, 128 (block + 1)) and below the vocabulary.
struct BlockSum {
  std::uint32_t weight = 0;  ///< sum of PowerWeight (sample_rule.hpp) at the temperature of the rule
  std::uint32_t plain = 0;   ///< at temperature 1
  float largest = 0;         ///< before the soft cap; NaN if one of them is
};

}  // namespace weft::kernels
