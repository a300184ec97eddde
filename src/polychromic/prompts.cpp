// SPDX-License-Identifier: Apache-2.0
#include "polychromic/prompts.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/random.hpp"
#include "language_model/generation/growing_text.hpp"
#include "language_model/tokenizer/lines.hpp"

namespace weft::polychromic {

using namespace language_model;
namespace {

/// Steps in the keys of random places: those of sequences of training have 0 (dataset/tokens/batches.cpp).
constexpr std::uint64_t kEvaluationStep = 1, kTrainingStep = 2;

std::vector<Prompt> prompts_of(std::string_view text, const Settings& settings, const Tokenizer& tokenizer) {
  std::vector<Prompt> prompts;
  for (PromptLine& line : prompt_lines(text, settings.prompts_file)) {
    if (settings.needs_references() && line.reference.empty())
      throw error(ExitCode::data,
                  "{}: has no \"reference\", which the reward compares answers with; add one, or use another "
                  "polychromic.reward",
                  line.source);
    Prompt prompt{
        .id = std::move(line.source), .text = std::move(line.text), .reference = std::move(line.reference), .ids = {}};
    prompt.ids = tokenizer.encode(prompt.text, prompt.id);
    if (settings.uses(RewardKind::reference_likelihood))
      prompt.reference_ids = tokenizer.encode(prompt.reference, prompt.id);
    if (!line.rendered) prompt.ids = tokenizer.with_begin(std::move(prompt.ids));
    if (prompt.ids.empty())
      throw error(ExitCode::data, "{}: the prompt has no token (a text begins with at least one); remove the line",
                  prompt.id);
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

}  // namespace

std::vector<Prompt> read_prompts(const Settings& settings, const Tokenizer& tokenizer, const parallel::World& world) {
  const auto parse = [&](std::string_view text) { return prompts_of(text, settings, tokenizer); };
  const std::string text = world.on_root([&] {
    std::string own = text_of_file(settings.prompts_file, "polychromic.prompts_file");
    parse(own);  // its errors become those of all ranks
    return own;
  });
  return parse(text);
}

Prompts::Prompts(const Settings& settings, const Corpus& corpus, std::uint64_t seed, const parallel::World& world)
    : settings_(settings), corpus_(corpus), seed_(seed) {
  if (!corpus.tokenizer)
    throw collective_error(ExitCode::usage,
                           "{}: token files without a tokeniser (prompts and answers are texts); give data.tokens",
                           corpus.train.name());
  if (!settings.prompts_file.empty()) {
    lines_ = read_prompts(settings, *corpus.tokenizer, world);
    for (const Prompt& prompt : lines_) longest_ = std::max(longest_, std::ssize(prompt.ids));
    n_evaluation_ = std::min(settings.evaluation_prompts, std::ssize(lines_));
    return;
  }
  longest_ = settings.prompt_tokens;
  const auto require_length = [&](const dataset::TokenSet& set) {
    if (set.size() < settings.prompt_tokens)
      throw collective_error(ExitCode::usage,
                             "{}: {} tokens, and polychromic.prompt_tokens = {}; take fewer or a longer text",
                             set.name(), set.size(), settings.prompt_tokens);
  };
  require_length(corpus.train);
  if (!corpus.validation) return;
  require_length(*corpus.validation);
  n_evaluation_ = settings.evaluation_prompts;
}

std::int64_t Prompts::longest_with_reference() const {
  std::int64_t longest = longest_;
  for (const Prompt& prompt : lines_)
    longest = std::max(longest, std::ssize(prompt.ids) + std::ssize(prompt.reference_ids));
  return longest;
}

Prompt Prompts::training(std::int64_t batch, std::int64_t number) const {
  if (lines_.empty()) return piece(corpus_.train, static_cast<std::uint64_t>(batch) + kTrainingStep, number);
  return lines_[static_cast<std::size_t>((batch * settings_.prompts + number) % std::ssize(lines_))];
}

Prompt Prompts::evaluation(std::int64_t number) const {
  return lines_.empty() ? piece(*corpus_.validation, kEvaluationStep, number)
                        : lines_[static_cast<std::size_t>(number)];
}

Prompt Prompts::piece(const dataset::TokenSet& set, std::uint64_t batch, std::int64_t number) const {
  const kernels::Random4 random =
      kernels::philox(seed_, kernels::Purpose::token_window, batch, static_cast<std::uint64_t>(number));
  const auto begin = static_cast<std::int64_t>(
      kernels::uniform_below(random, static_cast<std::uint64_t>(set.size() - settings_.prompt_tokens + 1)));
  Prompt prompt;
  prompt.ids.resize(static_cast<std::size_t>(settings_.prompt_tokens));
  set.read(begin, prompt.ids);
  prompt.text = valid_utf8(corpus_.tokenizer->detokenise(prompt.ids));
  prompt.id = fmt::format("{}, token {}", set.name(), begin);
  return prompt;
}

}  // namespace weft::polychromic
