// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/texts.hpp"

#include <filesystem>

#include "language_model/tokenizer/json_lines.hpp"

namespace weft::commands {
namespace {

using dataset::TokenSet;

TokenSet with_end(const TokenSet& set, const std::optional<language_model::Tokenizer>& tokenizer,
                  std::int64_t vocabulary) {
  const std::int64_t end = tokenizer ? language_model::end_of_text(*tokenizer) : -1;
  if (end < 0) return set;
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(set.size()));
  set.read(0, ids);
  if (ids.back() == end) return set;  // the post-processor has added it
  ids.push_back(static_cast<std::uint32_t>(end));
  return TokenSet(set.name(), std::move(ids), vocabulary, set.text_bytes());
}

}  // namespace

TokenSet training_text(const OpenedModel& opened, const std::optional<language_model::Tokenizer>& tokenizer,
                       bool held_out, const parallel::World& world) {
  const dataset::TokenSettings& data = opened.configuration().data;
  const language_model::Corpus corpus = language_model::load_corpus(data, world, tokenizer);
  const bool same = corpus.tokenizer.has_value() == tokenizer.has_value() &&
                    (!tokenizer || corpus.tokenizer->text() == tokenizer->text());
  if (!same || corpus.fingerprint != opened.found->manifest.dataset_fingerprint)
    throw collective_error(ExitCode::data,
                           "{}: has changed since the training (its {} part is not the one of the run); give a text",
                           data.train, held_out ? "held-out" : "training");
  return held_out ? *corpus.validation : corpus.train;
}

Texts load_texts(const TextChoice& choice, const OpenedModel& opened,
                 const std::optional<language_model::Tokenizer>& tokenizer, const parallel::World& world) {
  const dataset::TokenSettings& data = opened.configuration().data;
  const std::int64_t vocabulary = opened.architecture.vocabulary;
  if (choice.files.empty()) {
    if (!opened.found)
      throw collective_error(ExitCode::usage, "{}: the model comes without a text; give {}",
                             opened.directory->path().string(), choice.option);
    const bool validation = choice.split == "validation";
    if (!validation) return {{training_text(opened, tokenizer, false, world)}, data.train, "train"};
    if (!data.validation.empty())
      return {{language_model::load_tokens(data.validation, "data.validation", data, tokenizer, vocabulary, world)},
              data.validation,
              "validation"};
    if (data.validation_fraction == 0)
      throw collective_error(ExitCode::usage, "{}: the run has no validation data; give {}", opened.name(),
                             choice.option);
    return {{training_text(opened, tokenizer, true, world)}, data.train, "validation"};
  }
  Texts texts;
  for (const std::string& path : choice.files) {
    const bool text = !world
                           .on_root([&]() -> std::string {
                             if (!std::filesystem::exists(path))
                               throw error(ExitCode::usage, "{} \"{}\": no such file or directory; correct the path",
                                           choice.option, path);
                             return language_model::format_by_name(path) == dataset::DataFormat::text &&
                                            data.format != dataset::DataFormat::jsonl
                                        ? "text"
                                        : "";
                           })
                           .empty();
    const TokenSet set = language_model::load_tokens(path, choice.option.substr(0, choice.option.find(' ')), data,
                                                     tokenizer, vocabulary, world);
    texts.sets.push_back(text ? with_end(set, tokenizer, vocabulary) : set);
    texts.names += (texts.names.empty() ? "" : ", ") + path;
  }
  return texts;
}

}  // namespace weft::commands
