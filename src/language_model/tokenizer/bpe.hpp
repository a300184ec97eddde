// SPDX-License-Identifier: Apache-2.0
//
// Byte-pair encoding. A piece starts as the ids of its bytes or characters; as long as two neighbours have a merge, the
// pair with the lowest rank, of these the leftmost, is replaced by the id of both joined (Sennrich, Haddow and Birch
// 2016; Radford et al. 2019).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "language_model/tokenizer/piece_model.hpp"

namespace weft::language_model {

struct BpeSettings {
  /// Texts of each id, bytes if `is_byte_level`; empty: an added token alone.
  std::vector<std::string> tokens;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> merges;  ///< left and right id, by rank
  bool is_byte_level = true;
  bool ignore_merges = false;  ///< a piece that is a token as a whole is that token
  // What becomes of characters without a token. Without one of these they are an error:
  bool byte_fallback = false;            ///< they are the tokens "<0x00>" to "<0xFF>" of their bytes, if all exist
  std::optional<std::uint32_t> unknown;  ///< otherwise they are this id
  bool fuse_unknown = false;             ///< several in a row are it once
};

/// Immutable.
class Bpe : public PieceModel {
 public:
  /// Throws Error(data) "SOURCE: …" if a printable ASCII character has no id in a byte-level model, a merge makes no
  /// token, or tokens or merges repeat.
  Bpe(BpeSettings settings, std::string_view source);
  Bpe(const Bpe&) = delete;  // members refer to the settings
  Bpe& operator=(const Bpe&) = delete;

  const BpeSettings& settings() const { return settings_; }
  std::string_view name() const override { return "bpe"; }
  void encode(std::string_view piece, const TextPlace&, std::vector<std::uint32_t>& ids) const override;
  const std::vector<std::string>& tokens() const override { return settings_.tokens; }
  bool is_byte_level() const override { return settings_.is_byte_level; }
  bool separates(std::string_view mark) const override;

 private:
  struct Merge {
    std::uint32_t rank, result;
  };

  void units_of(std::string_view piece, const TextPlace&, std::vector<std::uint32_t>& units) const;
  void join(std::span<const std::uint32_t> units, std::vector<std::uint32_t>& ids) const;

  BpeSettings settings_;
  std::array<std::uint32_t, 256> byte_ids_{};
  std::unordered_map<std::uint64_t, Merge> merges_;
  std::unordered_map<std::string_view, std::uint32_t> ids_;  ///< views of the tokens
  ByteTokens bytes_;
};

}  // namespace weft::language_model
