// SPDX-License-Identifier: Apache-2.0
//
// WordPiece (BERT): a word is the longest token with which it begins, then the longest with which the rest begins, …;
// if a rest has none, the word is unknown.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "language_model/tokenizer/piece_model.hpp"

namespace weft::language_model {

struct WordPieceSettings {
  std::vector<std::string> tokens;  ///< by id; empty: an added token alone
  std::uint32_t unknown = 0;
  std::string continuation = "##";  ///< before tokens that do not begin a word
  std::size_t longest_word = 100;   ///< in characters; longer ones are unknown
};

/// Immutable.
class WordPiece : public PieceModel {
 public:
  /// Throws Error(data) "SOURCE: …" if tokens repeat.
  WordPiece(WordPieceSettings settings, std::string_view source);
  WordPiece(const WordPiece&) = delete;  // members refer to the settings
  WordPiece& operator=(const WordPiece&) = delete;

  std::string_view name() const override { return "wordpiece"; }
  void encode(std::string_view piece, const TextPlace&, std::vector<std::uint32_t>& ids) const override;
  const std::vector<std::string>& tokens() const override { return settings_.tokens; }

 private:
  WordPieceSettings settings_;
  std::unordered_map<std::string_view, std::uint32_t> ids_;  ///< views of the tokens
};

}  // namespace weft::language_model
