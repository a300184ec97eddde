// SPDX-License-Identifier: Apache-2.0
//
// Unigram language model (Kudo 2018; SentencePiece): of all ways to cut a piece into tokens, the one with the largest
// sum of scores, by Viterbi. Ties as in the tokenizers library: at each place the longest last token stays.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "language_model/tokenizer/piece_model.hpp"
#include "language_model/tokenizer/prefixes.hpp"

namespace weft::language_model {

struct UnigramSettings {
  std::vector<std::string> tokens;  ///< by id; empty: an added token alone
  std::vector<double> scores;       ///< of the tokens, as many as the model has; ids beyond are added tokens
  std::optional<std::uint32_t> unknown;
  bool byte_fallback = false;  ///< characters without a token are those of their bytes, "<0x00>" to "<0xFF>"
};

/// Immutable.
class Unigram : public PieceModel {
 public:
  /// Throws Error(data) "SOURCE: …" if scores are not finite.
  Unigram(UnigramSettings settings, std::string_view source);
  Unigram(const Unigram&) = delete;  // members refer to the settings
  Unigram& operator=(const Unigram&) = delete;

  std::string_view name() const override { return "unigram"; }
  void encode(std::string_view piece, const TextPlace&, std::vector<std::uint32_t>& ids) const override;
  const std::vector<std::string>& tokens() const override { return settings_.tokens; }

 private:
  UnigramSettings settings_;
  std::unordered_map<std::string_view, std::uint32_t> ids_;  ///< views of the tokens
  Prefixes prefixes_;
  double unknown_score_ = 0;
  ByteTokens bytes_;
};

}  // namespace weft::language_model
