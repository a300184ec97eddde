// SPDX-License-Identifier: Apache-2.0
// The normaliser "Precompiled": the character map of a SentencePiece model, as the tokenizers library applies it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "language_model/tokenizer/normaliser.hpp"

namespace weft::language_model {

class Precompiled : public Normaliser {
 public:
  /// `charsmap`: base64 of the size of a double-array trie (Darts), its units, and texts that end with a zero byte,
  /// each at the value of its key. Throws Error(data) "SOURCE: …" if it is not.
  Precompiled(std::string_view charsmap, std::string_view source);

  void apply(NormalisedText&, const TextPlace&) const override;

 private:
  std::optional<std::string_view> replacement(std::string_view part) const;

  std::vector<std::uint32_t> units_;
  std::string texts_;
};

}  // namespace weft::language_model
