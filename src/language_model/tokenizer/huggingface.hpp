// SPDX-License-Identifier: Apache-2.0
//
// Import of tokenizer.json, the format of the tokenizers library of Hugging Face. Encoding then gives the ids of
// `encode(text, add_special_tokens=False)` there. "truncation" and "padding" are about batches, for which the
// transformers library sets them anew; they are not read.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>
#include <variant>

#include "language_model/tokenizer/byte_level_bpe.hpp"
#include "language_model/tokenizer/pipeline.hpp"
#include "language_model/tokenizer/special_tokens.hpp"

namespace weft::language_model {

/// A byte-level BPE whose parts all have a place in Weft's own form, or another tokeniser. Throws Error(data)
/// "SOURCE: …" that names what is not understood: a model, a step, a setting, a key.
std::variant<ByteLevelBpe, Pipeline> tokeniser_of_huggingface(const nlohmann::json& file, std::string_view source);
/// Ids that the post-processor adds before and after a text. Throws as above.
SpecialTokens special_tokens_of_huggingface(const nlohmann::json& file, std::string_view source);

}  // namespace weft::language_model
