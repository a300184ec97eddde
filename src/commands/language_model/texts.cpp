// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/texts.hpp"

#include <filesystem>

namespace weft::commands {
namespace {

using dataset::TokenSet;

TokenSet with_end(const TokenSet& set, const std::optional<language_model::Tokenizer>& tokenizer,
                  std::int64_t vocabulary) {
  const std::int64_t end = tokenizer ? language_model::end_of_text(*tokenizer) : -1;
  if (end < 0) return set;
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(set.size()));
  set.read(0, ids);
  ids.push_back(static_cast<std::uint32_t>(end));
  return TokenSet(set.name(), std::move(ids), vocabulary, set.text_bytes());
}

}  // namespace

TokenSet training_text(const LoadedLanguageModel& loaded, bool held_out, const parallel::World& world) {
  const dataset::TokenSettings& data = loaded.configuration().data;
  const language_model::Corpus corpus = language_model::load_corpus(data, world);
  const bool same = corpus.tokenizer.has_value() == loaded.tokenizer.has_value() &&
                    (!loaded.tokenizer || corpus.tokenizer->text() == loaded.tokenizer->text());
  if (!same || corpus.fingerprint != loaded.opened.found->manifest.dataset_fingerprint)
    throw collective_error(
        ExitCode::data, "{}: has changed since the training (its {} part is not the one of the run); give --text FILE",
        data.train, held_out ? "held-out" : "training");
  return held_out ? *corpus.validation : corpus.train;
}

Texts load_texts(const Request& request, const LoadedLanguageModel& loaded, const parallel::World& world) {
  const dataset::TokenSettings& data = loaded.configuration().data;
  if (request.files.empty()) {
    if (!loaded.opened.found)
      throw collective_error(ExitCode::usage, "the model comes without a text; give --text FILES");
    const bool validation = request.split == "validation";
    if (!validation) return {{training_text(loaded, false, world)}, data.train, "train"};
    if (!data.validation.empty())
      return {{language_model::load_tokens(data.validation, loaded.tokenizer, loaded.architecture().vocabulary, world)},
              data.validation,
              "validation"};
    if (data.validation_fraction == 0)
      throw collective_error(ExitCode::usage, "--split validation: the run has no validation data; give --text FILE");
    return {{training_text(loaded, true, world)}, data.train, "validation"};
  }
  if (!request.split.empty())
    throw collective_error(ExitCode::usage, "--split and --text exclude each other (a split is of the run's own text)");
  Texts texts;
  for (const std::string& path : request.files) {
    const bool text =
        !world
             .on_root([&]() -> std::string {
               if (!std::filesystem::exists(path))
                 throw error(ExitCode::usage, "--text \"{}\": no such file or directory; correct the path", path);
               return std::filesystem::is_directory(path) || dataset::is_token_file(path) ? "" : "text";
             })
             .empty();
    const TokenSet set = language_model::load_tokens(path, loaded.tokenizer, loaded.architecture().vocabulary, world);
    texts.sets.push_back(text ? with_end(set, loaded.tokenizer, loaded.architecture().vocabulary) : set);
    texts.names += (texts.names.empty() ? "" : ", ") + path;
  }
  return texts;
}

}  // namespace weft::commands
