// SPDX-License-Identifier: Apache-2.0
// Export of Weft's own tokenisers as tokenizer.json.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "language_model/tokenizer/byte_level_bpe.hpp"
#include "language_model/tokenizer/special_tokens.hpp"

namespace weft::language_model {

/// JSON of a tokenizer.json for a byte-level BPE, the inverse of tokeniser_of_huggingface.
nlohmann::json huggingface_of_bpe(const std::vector<SplitRule>&, const BpeSettings&, const std::vector<AddedToken>&,
                                  const SpecialTokens&);
/// JSON of a tokenizer.json with one token per character: `characters` have the ids from 0, `symbols`, which no text
/// has, those after them. `unknown`: one of the symbols, or "".
nlohmann::json huggingface_of_characters(const std::vector<long>& characters, const std::vector<std::string>& symbols,
                                         const std::string& unknown);
/// JSON of a tokenizer.json with one token per byte.
nlohmann::json huggingface_of_bytes(const std::vector<std::string>& symbols);

}  // namespace weft::language_model
