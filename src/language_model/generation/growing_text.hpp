// SPDX-License-Identifier: Apache-2.0
//
// The text of a sample, as its tokens arrive: where it ends, and its bytes as valid UTF-8.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "language_model/tokenizer/tokenizer.hpp"

namespace weft::language_model {

/// Ids of the symbols that end a text: those of the files next to a tokenizer.json (tokenizer_files.hpp), and
/// <|endoftext|>, <|end_of_text|> and EOS if the tokeniser has them.
std::vector<std::uint32_t> end_symbols(const Tokenizer&);

/// The text with U+FFFD in place of each byte that is not part of a UTF-8 character.
std::string valid_utf8(std::string_view text);

class GrowingText {
 public:
  enum class End { none, stop, symbol };

  /// stops: texts, not empty, before which the text ends. All references must outlive the object.
  GrowingText(const Tokenizer&, std::span<const std::string> stops, std::span<const std::uint32_t> ends);

  /// Appends a token. A stop text may begin and end anywhere in tokens; of several the one that begins first counts.
  /// The text ends before it, or before a symbol of `ends`. To be called while `end()` is none.
  End append(std::uint32_t token);

  End end() const { return end_; }
  std::int64_t tokens() const { return tokens_; }      ///< all that were appended
  std::size_t bytes() const { return bytes_.size(); }  ///< of the text, without a stop text
  /// Valid UTF-8. Characters of which a part is missing are U+FFFD.
  std::string text() const { return valid_utf8(bytes_); }

 private:
  const Tokenizer& tokenizer_;
  std::span<const std::string> stops_;
  std::span<const std::uint32_t> ends_;
  std::string bytes_;
  std::int64_t tokens_ = 0;
  End end_ = End::none;
};

}  // namespace weft::language_model
