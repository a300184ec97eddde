// SPDX-License-Identifier: Apache-2.0
//
// Cuts a text into the pieces inside which byte-pair merges happen, by a regular expression with Unicode classes
// (PCRE2). Published patterns have names:
//
//   gpt2     https://github.com/openai/gpt-2/blob/master/src/encoder.py
//   llama3   https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
//
// Any other text is a pattern itself. Text between two matches is a piece as well, so that the pieces joined are the
// text.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace weft::language_model {

class Splitter {
 public:
  /// Throws Error(data) for a pattern that cannot be compiled.
  explicit Splitter(std::string_view pattern);

  /// True if no piece has a space after a visible ASCII character and none depends on text before it: a text may then
  /// be cut before such a space. Known of the published patterns.
  bool cuts_before_spaces() const { return published_; }

  /// Calls `piece` with every piece, in order. The text is valid UTF-8. Throws Error(data) "SOURCE: …" if the pattern
  /// exceeds PCRE2's limits of time and memory. `offset`: of the text in its source, for the message. Thread-safe.
  void split(std::string_view text, std::string_view source, std::size_t offset,
             const std::function<void(std::string_view)>& piece) const;

 private:
  std::string name_;
  bool published_ = false;
  std::shared_ptr<const void> code_;
};

/// The name of a published pattern that has this text, else the text.
std::string pattern_name(std::string_view pattern);
/// The inverse.
std::string published_pattern(std::string_view name);

}  // namespace weft::language_model
