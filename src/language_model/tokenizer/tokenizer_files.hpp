// SPDX-License-Identifier: Apache-2.0
// The files of a tokeniser in a directory of Hugging Face: what is read next to a tokenizer.json, and what an export
// writes.
#pragma once

#include <filesystem>

#include "language_model/tokenizer/tokenizer.hpp"

namespace weft::language_model {

/// Completes the special tokens by those of the files in a directory: eos_token_id (an id or a list) of config.json and
/// generation_config.json, or else eos_token of tokenizer_config.json. Throws Error(data) that names file and key.
Tokenizer with_files_of(const Tokenizer&, const std::filesystem::path& directory);

/// The eos_token of the tokenizer_config.json that the tokeniser came with; "" if there is none.
std::string stored_eos_token(const Tokenizer&);

/// Writes tokenizer.json, tokenizer_config.json and the files of special_tokens(); weft_tokenizer.json too, for kinds
/// that Weft does not recognise in a tokenizer.json (characters, bytes).
void write_tokenizer_files(const Tokenizer&, const std::filesystem::path& directory);

/// Names of the tokenisers in a directory of Hugging Face. That of Weft has precedence.
inline constexpr const char *kHuggingFaceTokenizer = "tokenizer.json", *kWeftTokenizer = "weft_tokenizer.json";

/// The tokeniser file of a directory, or the path of a file as it is.
std::filesystem::path tokenizer_file(const std::filesystem::path&);

}  // namespace weft::language_model
