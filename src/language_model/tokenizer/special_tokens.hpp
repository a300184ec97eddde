// SPDX-License-Identifier: Apache-2.0
// Special tokens of the files next to a tokenizer.json, and the files that an export copies next to its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace weft::language_model {

class Tokenizer;

struct SpecialTokens {
  std::vector<std::uint32_t> begin, end;     ///< added to a text by the post-processor of a tokenizer.json
  std::vector<std::uint32_t> ends;           ///< each ends a text that is written
  std::map<std::string, std::string> files;  ///< tokenizer_config.json and others of other programs, by name: contents
};

/// Completes the special tokens by those of the files in a directory: eos_token_id (an id or a list) of config.json and
/// generation_config.json, or else eos_token of tokenizer_config.json. Throws Error(data) that names file and key.
Tokenizer with_files_of(const Tokenizer&, const std::filesystem::path& directory);

/// Writes tokenizer.json, tokenizer_config.json and the files of special_tokens(); weft_tokenizer.json too, for kinds
/// that Weft does not recognise in a tokenizer.json (characters, bytes).
void write_tokenizer_files(const Tokenizer&, const std::filesystem::path& directory);

/// Name of a Weft tokeniser in a directory of Hugging Face. It has precedence over the tokenizer.json in the same
/// directory.
inline constexpr const char* kWeftTokenizer = "weft_tokenizer.json";

}  // namespace weft::language_model
