// SPDX-License-Identifier: Apache-2.0
//
// A directory of a language model that sentence-transformers has saved: its files say what becomes of the hidden
// states (modules.json, 1_Pooling/config.json), and of the text before them. The embedding of a text in Weft is the
// mean over its tokens; what says otherwise is an error, because other distances would follow without a word.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "language_model/tokenizer/tokenizer.hpp"

namespace weft::language_model {

/// Returns the number of tokens after which sentence-transformers cuts a text; none if the directory does not state
/// one, or has no modules.json, like most. Throws Error(usage) that names the first setting with which the embedding
/// is not the mean over the tokens of the text and those that the tokeniser adds; Error(data).
std::optional<std::int64_t> require_mean_pooling(const std::filesystem::path& directory);
/// The same for a language model, whose embedding is the mean over the tokens of the text alone: Error(usage) also for
/// a tokeniser that adds tokens.
std::optional<std::int64_t> require_mean_embedding(const std::filesystem::path& directory, const Tokenizer&);

}  // namespace weft::language_model
