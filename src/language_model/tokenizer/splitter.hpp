// SPDX-License-Identifier: Apache-2.0
//
// Cuts a text into the pieces inside which byte-pair merges happen, by regular expressions with Unicode classes: the
// first one cuts the text, the next one its pieces, and so on. Published patterns have names:
//
//   gpt2     https://github.com/openai/gpt-2/blob/master/src/encoder.py
//   llama3   https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
//
// Any other text is a pattern itself, of Oniguruma (pattern.hpp). Text between two matches is a piece as well, so that
// the pieces joined are the text.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace weft::language_model {

/// One of the expressions.
struct SplitRule {
  std::string pattern;
  bool covers_text = false;  ///< text between two matches is an error: the tokenizers library would leave it out
  bool operator==(const SplitRule&) const = default;
};

/// Pieces of digits before another rule: each digit by itself, or runs of them.
inline constexpr const char *kSingleDigits = "\\p{N}", *kRunsOfDigits = "\\p{N}+";

class Splitter {
 public:
  /// No rules: the text is one piece. Throws Error(data) for a pattern that cannot be translated or compiled.
  /// `source` begins its message.
  explicit Splitter(const std::vector<SplitRule>& rules, std::string_view source = "");
  explicit Splitter(std::string_view pattern) : Splitter(std::vector<SplitRule>{{std::string(pattern)}}) {}

  /// True if no piece has a space after a visible ASCII character and none depends on text before it: a text may then
  /// be cut before such a space. Known of the published patterns.
  bool cuts_before_spaces() const { return cuts_before_spaces_; }

  /// Calls `piece` with every piece, in order. The text is valid UTF-8. Throws Error(data) "SOURCE: …" if the pattern
  /// exceeds PCRE2's limits of time and memory. `offset`: of the text in its source, for the message. Thread-safe.
  void split(std::string_view text, std::string_view source, std::size_t offset,
             const std::function<void(std::string_view)>& piece) const;

 private:
  struct Stage {
    SplitRule rule;
    std::shared_ptr<const void> code;
  };
  struct Matching;
  void split(std::size_t stage, std::string_view text, Matching&) const;

  std::vector<Stage> stages_;
  bool cuts_before_spaces_ = false;
};

/// The name of a published pattern that has this text, else the text.
std::string pattern_name(std::string_view pattern);
/// Published pattern of a name, the inverse of pattern_name.
std::string published_pattern(std::string_view name);

}  // namespace weft::language_model
