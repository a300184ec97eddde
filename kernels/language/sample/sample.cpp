// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in sample_portable.cpp and sample_cuda.cu.
#include "kernels/language/sample/sample.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::sample) sample;
}  // namespace portable

namespace cuda {
decltype(kernels::sample) sample;
}  // namespace cuda

void sample(const Execution& execution, const SampleRule& rule, AnyMatrix logits, const GrowingSequences& sequences) {
  if (rule.vocabulary < 1 || rule.vocabulary > std::int64_t{1} << 23 || rule.vocabulary > logits.columns)
    throw Error(ExitCode::internal, "sample: the vocabulary is not between 1 and 2^23, or has no logits");
  if (!(rule.temperature >= 0) || rule.top_k < 0 || !(rule.top_p > 0 && rule.top_p <= 1))
    throw Error(ExitCode::internal, "sample: temperature, top_k or top_p is out of range");
  if (sequences.sequences.size != logits.rows || sequences.positions.size != logits.rows ||
      sequences.streams.size != logits.rows || sequences.ids.size != logits.rows)
    throw Error(ExitCode::internal, "sample: there is not one sequence per row of logits");
  // The most probable token is the one that top_k = 1 leaves.
  SampleRule effective = rule;
  if (rule.temperature == 0) effective.temperature = 1, effective.top_k = 1;
  effective.temperature = std::max(effective.temperature, 1e-6f);  // its inverse stays finite
  if (effective.top_k >= rule.vocabulary) effective.top_k = 0;
  dispatch<portable::sample, cuda::sample>(execution, effective, logits, sequences);
}

}  // namespace weft::kernels
