// SPDX-License-Identifier: Apache-2.0
//
// Import and export of tokenizer.json, the format of the tokenizers library of Hugging Face, with a byte-level BPE:
// GPT-2, Llama 3 and others. Encoding then gives the ids of `encode(text, add_special_tokens=False)` there.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "language_model/tokenizer/bpe.hpp"

namespace weft::language_model {

/// Throws Error(data) "SOURCE: …" that names what is not supported: another model, a normaliser, another pre-tokeniser,
/// dropout, added tokens that strip white space.
Bpe bpe_of_huggingface(const nlohmann::json& file, std::string_view source);

/// The inverse. Its added tokens are special there.
nlohmann::json huggingface_of_bpe(const Bpe&);

}  // namespace weft::language_model
