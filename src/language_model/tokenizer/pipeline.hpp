// SPDX-License-Identifier: Apache-2.0
//
// A tokeniser as its parts, in the order in which a text passes them: added tokens that are found in the text as it is,
// normalisers, added tokens that are found in normalised text, pre-tokenisers, the model. Order and meaning as in the
// tokenizers library of Hugging Face.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "language_model/tokenizer/added_tokens.hpp"
#include "language_model/tokenizer/normaliser.hpp"
#include "language_model/tokenizer/piece_cache.hpp"
#include "language_model/tokenizer/piece_model.hpp"
#include "language_model/tokenizer/pre_tokeniser.hpp"
#include "language_model/tokenizer/token_decoder.hpp"

namespace weft::language_model {

/// Immutable.
class Pipeline {
 public:
  struct Parts {
    Normalisers normalisers;
    std::vector<AddedToken> added;
    PreTokenisers pre_tokenisers;
    std::unique_ptr<const PieceModel> model;  ///< its tokens have room for the ids of the added ones
    Decoder decoder;                          ///< not of a byte-level model, whose tokens are bytes
  };

  /// Throws Error(data) "SOURCE: …" if ids of added tokens are not their own, or ids have no token.
  Pipeline(Parts parts, std::string_view source);

  const PieceModel& model() const { return *model_; }
  const std::vector<AddedToken>& added() const { return added_.tokens(); }
  std::size_t vocabulary_size() const { return model_->tokens().size(); }

  /// Ids of a text, valid UTF-8; `offset`: of the text in its source, for messages. Throws Error(data) for a character
  /// without a token.
  std::vector<std::uint32_t> encode(std::string_view text, std::string_view source, std::size_t offset,
                                    PieceCache& cache) const;
  /// True if a text may be cut before a space after a visible ASCII character: the ids of the parts are its own.
  bool cuts_before_spaces() const;
  /// The bytes of an id; `first`: of a text.
  std::string text_of(std::uint32_t id, bool first) const;

 private:
  class Encoding;

  Normalisers normalisers_;
  AddedTokens added_;
  PreTokenisers pre_tokenisers_;
  std::unique_ptr<const PieceModel> model_;
  Decoder decoder_;
};

}  // namespace weft::language_model
