// SPDX-License-Identifier: Apache-2.0
//
// Cuts a text by regular expressions with Unicode classes: the first one cuts the text, the next one its pieces, and so
// on. Published patterns have names:
//
//   gpt2     https://github.com/openai/gpt-2/blob/master/src/encoder.py
//   llama3   https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
//
// Any other text is a pattern itself, of Oniguruma (pattern.hpp).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "language_model/tokenizer/expression.hpp"
#include "language_model/tokenizer/pre_tokeniser.hpp"

namespace weft::language_model {

/// What becomes of the matches of a pattern and of the text between them: pieces of their own, or joined.
enum class Cut { isolated, removed, with_previous, with_next, runs };

/// One of the expressions.
struct SplitRule {
  std::string pattern;
  bool covers_text = false;  ///< text between two matches is an error: the tokenizers library would leave it out
  Cut cut = Cut::isolated;
  bool inverted = false;  ///< text between two matches is cut as a match
  bool operator==(const SplitRule&) const = default;
};

/// Pieces of digits before another rule: each digit by itself, or runs of them.
inline constexpr const char *kSingleDigits = "\\p{N}", *kRunsOfDigits = "\\p{N}+";
/// White space, to be removed.
inline constexpr const char* kWhiteSpace = "\\s";

class Splitter : public PreTokeniser {
 public:
  /// No rules: the text is one piece. Throws Error(data) for a pattern that cannot be translated or compiled.
  /// `source` begins its message.
  explicit Splitter(const std::vector<SplitRule>& rules, std::string_view source = "");
  explicit Splitter(std::string_view pattern) : Splitter(std::vector<SplitRule>{{std::string(pattern)}}) {}

  /// Known of the published patterns, and where white space is removed first.
  SpaceCuts space_cuts() const override { return space_cuts_; }
  void split(const Piece&, const TextPlace&, const PieceSink&) const override;

 private:
  struct Stage {
    SplitRule rule;
    Expression expression;
  };
  void split_at(std::size_t stage, const Piece&, const TextPlace&, const PieceSink&) const;

  std::vector<Stage> stages_;
  SpaceCuts space_cuts_ = SpaceCuts::may_join;
};

/// The name of a published pattern that has this text, else the text.
std::string pattern_name(std::string_view pattern);
/// Published pattern of a name, the inverse of pattern_name.
std::string published_pattern(std::string_view name);

}  // namespace weft::language_model
