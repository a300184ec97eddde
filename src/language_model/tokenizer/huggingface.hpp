// SPDX-License-Identifier: Apache-2.0
//
// Import and export of tokenizer.json, the format of the tokenizers library of Hugging Face, with a byte-level BPE:
// GPT-2, Llama 3 and others. Encoding then gives the ids of `encode(text, add_special_tokens=False)` there.
// "truncation" and "padding" are about batches, for which the transformers library sets them anew; they are not read.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "language_model/tokenizer/bpe.hpp"
#include "language_model/tokenizer/special_tokens.hpp"

namespace weft::language_model {

/// Throws Error(data) "SOURCE: …" that names what is not supported: another model, a normaliser, another pre-tokeniser,
/// dropout, added tokens that strip white space, keys that are not known.
Bpe bpe_of_huggingface(const nlohmann::json& file, std::string_view source);
/// Ids that the post-processor adds before and after a text. Throws as above.
SpecialTokens special_tokens_of_huggingface(const nlohmann::json& file, std::string_view source);

/// JSON of a tokenizer.json for a BPE model, the inverse of bpe_of_huggingface.
nlohmann::json huggingface_of_bpe(const Bpe&, const SpecialTokens&);
/// JSON of a tokenizer.json with one token per character: `characters` have the ids from 0, `symbols`, which no text
/// has, those after them. `unknown`: one of the symbols, or "".
nlohmann::json huggingface_of_characters(const std::vector<long>& characters, const std::vector<std::string>& symbols,
                                         const std::string& unknown);
/// JSON of a tokenizer.json with one token per byte.
nlohmann::json huggingface_of_bytes(const std::vector<std::string>& symbols);

}  // namespace weft::language_model
