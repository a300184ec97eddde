// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace weft::language_model {

/// Ids of pieces, for texts that a thread encodes one after the other with one tokeniser.
struct PieceCache {
  struct ViewHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  /// Piece -> first of its ids in `ids`, number.
  std::unordered_map<std::string, std::pair<std::size_t, std::size_t>, ViewHash, std::equal_to<>> places;
  std::vector<std::uint32_t> ids;
};

}  // namespace weft::language_model
