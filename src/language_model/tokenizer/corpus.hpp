// SPDX-License-Identifier: Apache-2.0
//
// From paths to ids: the training and validation set of a run, and the tokeniser of both.
#pragma once

#include <optional>
#include <string>

#include "dataset/tokens/batches.hpp"
#include "dataset/tokens/token_settings.hpp"
#include "language_model/tokenizer/tokenizer.hpp"
#include "parallel/world.hpp"

namespace weft::language_model {

struct Corpus {
  dataset::TokenSet train;
  std::optional<dataset::TokenSet> validation;
  std::int64_t vocabulary = 0;         ///< without padding
  std::optional<Tokenizer> tokenizer;  ///< none: token files that have none
  std::string fingerprint;             ///< of train and tokeniser (dataset/fingerprint.hpp)
  dataset::Segments segments;          ///< of train
};

/// Text is read and encoded by rank 0 and broadcast; token files are mapped by every rank. Collective; errors are known
/// to all ranks: Error(usage) for a path that does not exist and for settings that do not fit the data, Error(data) for
/// invalid UTF-8, bad rows of JSON Lines, an empty file, a set shorter than a sequence and its last target, and damaged
/// files. `of_model`: the tokeniser of a model that the training begins with, taken where the settings name none.
/// `owner_field`: see JsonRowReader; of the training set.
Corpus load_corpus(const dataset::TokenSettings&, const parallel::World&,
                   const std::optional<Tokenizer>& of_model = std::nullopt, const std::string& owner_field = "");

/// Logs the special tokens that are added to texts, if there are any.
void note_special_tokens(const Tokenizer&);

/// Loads a tokeniser: "bytes", with special symbols, or the tokeniser file at a path or in a directory, with the
/// special tokens of the files next to a tokenizer.json. `key` names the path in messages. Throws Error(usage) if there
/// is no such file, Error(data) if it is none.
Tokenizer load_tokenizer(const std::string& tokens, const std::vector<std::string>& special, std::string_view key);

/// The ids of one text file, file of JSON Lines, token file or directory of token files for an existing tokeniser:
/// validation and `weft lm evaluate`. `key` names the path in messages; format, loss_on and bad_lines of the settings
/// apply. Token files must have been written with the same tokeniser, or with none and the same vocabulary. Collective;
/// errors as above.
dataset::TokenSet load_tokens(const std::string& path, std::string_view key, const dataset::TokenSettings&,
                              const std::optional<Tokenizer>&, std::int64_t vocabulary, const parallel::World&);

}  // namespace weft::language_model
