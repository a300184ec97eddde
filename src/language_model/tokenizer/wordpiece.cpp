// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/wordpiece.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace weft::language_model {

WordPiece::WordPiece(WordPieceSettings settings, std::string_view source) : settings_(std::move(settings)) {
  for (std::size_t id = 0; id < settings_.tokens.size(); ++id)
    if (const std::string& token = settings_.tokens[id];
        !token.empty() && !ids_.emplace(token, static_cast<std::uint32_t>(id)).second)
      throw error(ExitCode::data, "{}: id {} is the same token as another one; is it complete?", source, id);
}

void WordPiece::encode(std::string_view piece, const TextPlace&, std::vector<std::uint32_t>& ids) const {
  const auto is_first_byte = [](char byte) { return (byte & 0xc0) != 0x80; };
  const std::size_t before = ids.size();
  bool known =
      static_cast<std::size_t>(std::count_if(piece.begin(), piece.end(), is_first_byte)) <= settings_.longest_word;
  for (std::size_t begin = 0; begin < piece.size() && known;) {
    const std::string prefix = begin > 0 ? settings_.continuation : "";
    std::size_t end = piece.size();
    for (; end > begin; --end) {
      if (end < piece.size() && !is_first_byte(piece[end])) continue;
      const std::string token = prefix + std::string(piece.substr(begin, end - begin));
      const auto found = ids_.find(token);
      if (found == ids_.end()) continue;
      ids.push_back(found->second);
      break;
    }
    known = end > begin;
    begin = end;
  }
  if (known) return;
  ids.resize(before);
  ids.push_back(settings_.unknown);
}

}  // namespace weft::language_model
