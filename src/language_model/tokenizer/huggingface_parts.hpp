// SPDX-License-Identifier: Apache-2.0
// The parts of a tokenizer.json around its model. Each function throws Error(data) "SOURCE: …" that names what is not
// understood.
#pragma once

#include "language_model/tokenizer/json_part.hpp"
#include "language_model/tokenizer/normaliser.hpp"
#include "language_model/tokenizer/pre_tokeniser.hpp"
#include "language_model/tokenizer/special_tokens.hpp"
#include "language_model/tokenizer/splitter.hpp"
#include "language_model/tokenizer/token_decoder.hpp"

namespace weft::language_model {

/// Tokens of a vocabulary, ids and merges: more are hardly meant.
inline constexpr std::size_t kMostTokens = std::size_t{1} << 22;

Normalisers normalisers_of(const JsonPart& normalizer);

struct PreTokeniserParts {
  PreTokenisers steps;
  bool is_byte_level = false;   ///< ends with ByteLevel: the pieces are bytes
  bool has_rules_alone = true;  ///< `rules` are all steps
  std::vector<SplitRule> rules;
};
PreTokeniserParts pre_tokenisers_of(const JsonPart& pre_tokenizer);

/// Reads the decoder of a model of characters.
Decoder decoder_of(const JsonPart& decoder);
/// Throws if the decoder is not that of a byte-level model.
void require_byte_level_decoder(const JsonPart& decoder);

/// Ids that the post-processor adds before and after a text.
SpecialTokens special_tokens_of(const JsonPart& post_processor);

}  // namespace weft::language_model
