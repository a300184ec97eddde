// SPDX-License-Identifier: Apache-2.0
// Byte-level BPE: what Weft trains, and the parts of a tokenizer.json that its own form has (docs/file_formats.md).
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "language_model/tokenizer/added_tokens.hpp"
#include "language_model/tokenizer/bpe.hpp"
#include "language_model/tokenizer/pipeline.hpp"
#include "language_model/tokenizer/splitter.hpp"

namespace weft::language_model {

struct ByteLevelBpe {
  std::vector<SplitRule> splits;  ///< with the default `cut`, not inverted
  BpeSettings model;
  std::vector<AddedToken> added;  ///< without lstrip, rstrip and single_word
};

/// The tokeniser of these parts. Throws Error(data) "SOURCE: …" for an inconsistent model.
Pipeline pipeline_of(ByteLevelBpe parts, std::string_view source);

/// Counts of pieces of a training text.
class PieceCounts {
 public:
  explicit PieceCounts(std::string_view pattern) : pattern_(pattern), splitter_(pattern) {}
  /// Adds a text, valid UTF-8. Throws Error(data) "SOURCE: …".
  void add(std::string_view text, std::string_view source);

  const std::string& pattern() const { return pattern_; }
  const std::unordered_map<std::string, std::int64_t>& counts() const { return counts_; }

 private:
  std::string pattern_;
  Splitter splitter_;
  std::unordered_map<std::string, std::int64_t> counts_;
};

/// Learns a vocabulary of `size` ids: the 256 bytes in order, one id per merge, then `added`. A merge joins the most
/// frequent pair of neighbours (each pair of adjacent positions counts, "aaa" has two pairs "aa"), of equally frequent
/// ones the smallest (left, right), everywhere from left to right; a token of the same bytes as an earlier one has its
/// id. The vocabulary is smaller if no pair is left.
ByteLevelBpe train_bpe(const PieceCounts&, std::int64_t size, const std::vector<std::string>& added);

}  // namespace weft::language_model
