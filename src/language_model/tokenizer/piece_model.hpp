// SPDX-License-Identifier: Apache-2.0
// A model makes ids of the pieces of a text, each by itself.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "language_model/tokenizer/text_place.hpp"

namespace weft::language_model {

class PieceModel {
 public:
  virtual ~PieceModel() = default;
  /// Its name in messages and in a tokenizer.json, in lower case: "bpe".
  virtual std::string_view name() const = 0;
  /// Appends the ids of a piece, which is not empty. Throws Error(data) that names the place of a character without an
  /// id. Thread-safe.
  virtual void encode(std::string_view piece, const TextPlace&, std::vector<std::uint32_t>& ids) const = 0;
  /// Texts by id; "" for ids that the model does not make.
  virtual const std::vector<std::string>& tokens() const = 0;
  /// True if its tokens are bytes, not characters.
  virtual bool is_byte_level() const { return false; }
  /// True if the ids of a piece are those of its parts when it is cut before each `mark` (a character) that follows
  /// another character.
  virtual bool separates(std::string_view mark) const {
    (void)mark;
    return false;
  }
};

/// Ids of "<0x00>" to "<0xFF>", which stand for the bytes of characters without a token.
class ByteTokens {
 public:
  template <class Ids>
  explicit ByteTokens(const Ids& id_of) {
    ids_.assign(256, kNoByte);
    for (int byte = 0; byte < 256; ++byte)
      if (const auto found = id_of.find(fmt::format("<0x{:02X}>", byte)); found != id_of.end())
        ids_[static_cast<std::size_t>(byte)] = found->second;
  }
  ByteTokens() = default;

  /// Appends the ids of all bytes of a text. False, and nothing is appended, if one has none.
  bool append(std::string_view text, std::vector<std::uint32_t>& ids) const {
    if (ids_.empty()) return false;
    const std::size_t before = ids.size();
    for (const char byte : text) {
      const std::uint32_t id = ids_[static_cast<unsigned char>(byte)];
      if (id == kNoByte) {
        ids.resize(before);
        return false;
      }
      ids.push_back(id);
    }
    return true;
  }

 private:
  static constexpr std::uint32_t kNoByte = UINT32_MAX;
  std::vector<std::uint32_t> ids_;  // [byte], or none
};

}  // namespace weft::language_model
