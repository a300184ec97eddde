// SPDX-License-Identifier: Apache-2.0
// Tokens that are found in a text before it is cut into pieces: "<|endoftext|>".
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "language_model/tokenizer/normaliser.hpp"
#include "language_model/tokenizer/prefixes.hpp"

namespace weft::language_model {

struct AddedToken {
  std::uint32_t id = 0;
  std::string content;
  bool special = true;       ///< to other programs, which may leave it out of detokenised text
  bool normalized = false;   ///< looked for in normalised text, between the others, in normalised form
  bool lstrip = false;       ///< takes the white space before it
  bool rstrip = false;       ///< takes the white space after it
  bool single_word = false;  ///< found only where no letter, mark or digit is next to it
};

class AddedTokens {
 public:
  AddedTokens() = default;
  /// Throws Error(data) "SOURCE: …" if contents, ids or normalised forms repeat or are empty.
  AddedTokens(std::vector<AddedToken> tokens, const Normalisers&, std::string_view source);
  AddedTokens(AddedTokens&&) = default;  // not copied: members refer to the tokens
  AddedTokens& operator=(AddedTokens&&) = default;

  const std::vector<AddedToken>& tokens() const { return tokens_; }
  /// The token of an id; null if there is none.
  const AddedToken* find(std::uint32_t id) const;
  /// The form of a token's content that is looked for.
  const std::string& form(const AddedToken& token) const;

  using TextSink = std::function<void(std::string_view)>;
  using IdSink = std::function<void(std::uint32_t)>;
  /// Calls `text` and `id` with the parts of a text, in order: the tokens, leftmost and longest first, and what is
  /// between them. `normalized`: the tokens with this property, which are looked for in normalised text.
  void split(std::string_view whole, bool normalized, const TextSink& text, const IdSink& id) const;
  bool has(bool normalized) const { return !(normalized ? in_normalised_ : in_text_).empty(); }
  /// True if parts of a text that is cut before a space have the tokens of the whole.
  bool cuts_before_spaces() const;

 private:
  std::vector<AddedToken> tokens_;
  std::vector<std::string> forms_;                        // [token]
  std::unordered_map<std::uint32_t, std::size_t> by_id_;  // index of the token
  Prefixes in_text_, in_normalised_;                      // numbers: indices of tokens
};

}  // namespace weft::language_model
