// SPDX-License-Identifier: Apache-2.0
//
// Token -> text. Every step changes one token, so that the text of a sequence grows by that of its next token: only the
// first token may be treated otherwise. Bytes stay bytes: those of a part of a character are not valid UTF-8.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "language_model/tokenizer/metaspace.hpp"
#include "language_model/tokenizer/replace.hpp"

namespace weft::language_model {

class DecoderStep {
 public:
  virtual ~DecoderStep() = default;
  /// Changes the text of a token; `first`: of a sequence. Thread-safe.
  virtual void apply(std::string& token, bool first) const = 0;
};
using Decoder = std::vector<std::unique_ptr<const DecoderStep>>;

std::unique_ptr<const DecoderStep> replacing_decoder(Replace);
/// "<0x41>" to a byte.
std::unique_ptr<const DecoderStep> byte_fallback_decoder();
/// Removes up to `start` characters `content` at the start of each token, or of the first one alone, and up to `stop`
/// at the end of each.
std::unique_ptr<const DecoderStep> stripping_decoder(std::string content, std::size_t start, std::size_t stop,
                                                     bool first_alone);
/// Replacements to spaces; those of the first token are removed, unless none is put before a text.
std::unique_ptr<const DecoderStep> metaspace_decoder(const MetaspaceSettings&);
/// Removes `prefix` of tokens that go on a word, puts a space before others; `cleanup`: removes it before punctuation
/// and English suffixes.
std::unique_ptr<const DecoderStep> wordpiece_decoder(std::string prefix, bool cleanup);
/// A space before each token but the first.
std::unique_ptr<const DecoderStep> spacing_decoder();

}  // namespace weft::language_model
