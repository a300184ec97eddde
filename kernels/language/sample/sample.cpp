// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/sample/sample.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/language/sample/sample_rule.hpp"

namespace weft::kernels {

void keep_probable(const Execution& execution, const SampleRule& rule, AnyMatrix logits,
                   Array<const std::int32_t> targets) {
  if (rule.vocabulary < 1 || rule.vocabulary > std::int64_t{1} << 23 || rule.vocabulary > logits.columns ||
      targets.size != logits.rows || !(rule.temperature > 0) || rule.top_k != 0 || !(rule.top_p > 0 && rule.top_p <= 1))
    throw Error(ExitCode::internal, "keep_probable: sizes, temperature, top_k or top_p are out of range");
  if (rule.keeps_all()) return;
  SampleRule effective = rule;
  effective.temperature = std::max(rule.temperature, 1e-6f);
  mask_others(execution, effective, logits, targets);
}

void sample(const Execution& execution, const SampleRule& rule, AnyMatrix logits, Matrix<BlockSum> sums,
            const GrowingSequences& sequences) {
  if (rule.vocabulary < 1 || rule.vocabulary > std::int64_t{1} << 23 || rule.vocabulary > logits.columns)
    throw Error(ExitCode::internal, "sample: the vocabulary is not between 1 and 2^23, or has no logits");
  if (!(rule.temperature >= 0) || rule.top_k < 0 || !(rule.top_p > 0 && rule.top_p <= 1))
    throw Error(ExitCode::internal, "sample: temperature, top_k or top_p is out of range");
  if (sequences.sequences.size != logits.rows || sequences.positions.size != logits.rows ||
      sequences.streams.size != logits.rows || sequences.ids.size != logits.rows)
    throw Error(ExitCode::internal, "sample: there is not one sequence per row of logits");
  SampleRule effective = rule;
  effective.temperature = std::max(rule.temperature, 1e-6f);  // its inverse stays finite
  if (effective.top_k >= rule.vocabulary) effective.top_k = 0;
  if (!rule.draws_by_blocks()) return sample_kept(execution, effective, logits, sequences);
  if (sums.rows != logits.rows || sums.columns != draw_blocks(rule.vocabulary))
    throw Error(ExitCode::internal, "sample: there is not one sum per row and block of ids");
  const BlockRule by_blocks(rule);
  sum_blocks(execution, by_blocks, logits, sums);
  sample_by_blocks(execution, by_blocks, logits, sums, sequences);
}

}  // namespace weft::kernels
