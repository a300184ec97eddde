// SPDX-License-Identifier: Apache-2.0
#include "polychromic/answer_work.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "language_model/generation/generator.hpp"
#include "language_model/run/pass_work.hpp"

namespace weft::polychromic {

using namespace language_model;

namespace {

/// Bytes of several phases, a sum over work_of.
double bytes_of(std::span<const std::string> phases, std::string_view pass,
                const language_model::Configuration& configuration, const Architecture& architecture) {
  double bytes = 0;
  for (const std::string& phase : phases)
    bytes += work_of(fmt::format("{}{}", phase, pass), configuration, architecture).bytes;
  return bytes;
}

double generation_bytes(const language_model::Configuration& configuration, const GenerationSettings& generation) {
  double bytes = 0;
  for (const char* phase : {"embedding", "norms", "products", "attention", "activation", "sampling"})
    bytes += generation_work(phase, configuration, generation).bytes;
  return bytes;
}

}  // namespace

run::PhaseBytes answer_bytes(const AnswerWork& answers, const language_model::Configuration& configuration,
                             const Architecture& architecture) {
  const std::int64_t count = answers.prompts * answers.samples, length = answers.prompt_tokens + answers.answer_tokens;
  if (count == 0 || answers.answer_tokens == 0) return {};
  const GenerationSettings drawn{.architecture = part_of(architecture, grid_shape(configuration), 0),
                                 .type = activation_type(configuration),
                                 .rows = count,
                                 .prompts = answers.prompts,
                                 .longest_prompt = std::max<std::int64_t>(1, answers.prompt_tokens),
                                 .new_tokens = answers.answer_tokens};
  // A forward pass over all positions, without logits.
  GenerationSettings embedded = drawn;
  embedded.prompts = count;
  embedded.longest_prompt = length + 1;
  embedded.new_tokens = 0;
  language_model::Configuration rows = configuration;
  rows.data.batch_tokens = count * length;
  rows.data.sequence = length;
  rows.parallel.data = 1;
  rows.memory.micro_tokens = std::max(length, configuration.micro_tokens() / length * length);
  const std::vector<std::string> phases = phases_of_both_passes();
  const double forward = bytes_of(phases, ", forward", rows, architecture),
               loss = work_of("loss", rows, architecture).bytes,
               trained = forward + bytes_of(phases, ", backward", rows, architecture) + loss +
                         work_of("weight gradients", rows, architecture).bytes;
  run::PhaseBytes all = {{"generate", answers.drawn * generation_bytes(configuration, drawn)},
                         {"embed", answers.embedded * generation_bytes(configuration, embedded)},
                         {"policy forward", answers.scored * (forward + loss / 2)},
                         {"policy backward", answers.trained * trained}};
  std::erase_if(all, [](const auto& phase) { return phase.second == 0; });
  return all;
}

}  // namespace weft::polychromic
