// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/diversity/set_advantages.hpp"

#include "base/error.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::set_advantages) set_advantages;
}  // namespace portable

namespace cuda {
decltype(kernels::set_advantages) set_advantages;
}  // namespace cuda

void set_advantages(const Execution& execution, const SetRule& rule, const AnswerSets& sets, Array<double> workspace,
                    const SetAdvantages& out) {
  const std::int64_t rows = sets.prompts * sets.samples;
  if (rule.set_size < 2) throw Error(ExitCode::internal, "set_advantages: a set has at least two answers");
  if (sets.prompts < 0 || sets.samples < 0 || sets.embeddings.rows != rows || sets.rewards.size != rows ||
      out.counts.size != sets.prompts || out.diversity.size != sets.prompts || out.objective.size != sets.prompts ||
      out.distances.size != rows || out.advantages.size != rows ||
      workspace.size < set_advantages_workspace(sets.prompts, sets.samples))
    throw Error(ExitCode::internal, "set_advantages: the sizes of embeddings, rewards, results and workspace differ");
  if (rows == 0) return;
  dispatch<portable::set_advantages, cuda::set_advantages>(execution, rule, sets, workspace, out);
}

}  // namespace weft::kernels
