// SPDX-License-Identifier: Apache-2.0
#include "language_model/policy/prompts.hpp"

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "base/json.hpp"
#include "kernels/random.hpp"
#include "language_model/generation/growing_text.hpp"
#include "storage/mapped_file.hpp"

namespace weft::language_model {
namespace {

constexpr std::int64_t kLargestFile = std::int64_t{256} << 20, kMostPromptsInFile = std::int64_t{1} << 20;
/// Steps in the keys of random places: those of sequences of training have 0 (dataset/tokens/batches.cpp).
constexpr std::uint64_t kEvaluationStep = 1, kTrainingStep = 2;
constexpr const char* kKey = "polychromic.prompts_file";

std::string text_of_file(const std::string& path) {
  if (!std::filesystem::is_regular_file(path))
    throw error(ExitCode::usage, "{} = \"{}\": no such file; correct the path", kKey, path);
  const storage::MappedFile file(path);
  if (std::ssize(file.bytes()) > kLargestFile)
    throw error(ExitCode::data, "{}: {} bytes (a file of prompts has at most {}); divide it", path, file.bytes().size(),
                kLargestFile);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

std::string string_in(const Json& object, const char* name) {
  return object.contains(name) && object[name].is_string() ? object[name].get<std::string>() : "";
}

std::vector<Prompt> prompts_of(std::string_view rest, const std::string& path, const Tokenizer& tokenizer) {
  const bool objects = path.ends_with(".jsonl");
  std::vector<Prompt> prompts;
  for (std::int64_t line = 1; !rest.empty(); ++line) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view text = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (text.ends_with('\r')) text.remove_suffix(1);
    Prompt prompt{.id = fmt::format("{}:{}", path, line), .text = std::string(text), .reference = "", .ids = {}};
    if (objects) {
      const Json object = parse_json(text);
      if (!object.is_object() || string_in(object, "prompt").empty())
        throw error(ExitCode::data,
                    "{}: not a JSON object with a string \"prompt\" that is not empty; correct the line", prompt.id);
      prompt.text = string_in(object, "prompt");
      prompt.reference = string_in(object, "reference");
    }
    prompt.ids = tokenizer.encode(prompt.text, prompt.id);
    if (prompt.ids.empty())
      throw error(ExitCode::data, "{}: the prompt is empty (a text begins with at least one token); remove the line",
                  prompt.id);
    prompts.push_back(std::move(prompt));
    if (std::ssize(prompts) > kMostPromptsInFile)
      throw error(ExitCode::data, "{}: more than {} prompts; divide the file", path, kMostPromptsInFile);
  }
  if (prompts.empty()) throw error(ExitCode::data, "{}: no prompt; give a file with some", path);
  return prompts;
}

}  // namespace

Prompts::Prompts(const PolychromicSettings& settings, const Corpus& corpus, std::uint64_t seed,
                 const parallel::World& world)
    : settings_(settings), corpus_(corpus), seed_(seed) {
  if (!corpus.tokenizer)
    throw collective_error(ExitCode::usage,
                           "{}: token files without a tokeniser (prompts and answers are texts); give data.tokens",
                           corpus.train.name());
  if (!settings.prompts_file.empty()) {
    const auto parse = [&](std::string_view text) {
      return prompts_of(text, settings.prompts_file, *corpus.tokenizer);
    };
    const std::string text = world.on_root([&] {
      std::string own = text_of_file(settings.prompts_file);
      parse(own);  // its errors become those of all ranks
      return own;
    });
    lines_ = parse(text);
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
  prompt.text = valid_utf8(corpus_.tokenizer->decode(prompt.ids));
  prompt.id = fmt::format("{}, token {}", set.name(), begin);
  return prompt;
}

}  // namespace weft::language_model
