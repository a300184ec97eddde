// SPDX-License-Identifier: Apache-2.0
#include "report/html.hpp"

#include <algorithm>

namespace weft::report {
namespace {

/// Bytes of the well-formed UTF-8 character that `text` begins with, 0 when it begins with none.
std::size_t character_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto follows = [&](std::size_t i) { return (byte(i) & 0xC0u) == 0x80u; };
  const unsigned first = byte(0);
  if (first < 0x80u) return 1;
  if (first >= 0xC2u && first <= 0xDFu) return follows(1) ? 2 : 0;
  if ((first & 0xF0u) == 0xE0u) {
    const bool overlong = first == 0xE0u && byte(1) < 0xA0u, surrogate = first == 0xEDu && byte(1) > 0x9Fu;
    const bool not_a_character = first == 0xEFu && byte(1) == 0xBFu && byte(2) >= 0xBEu;
    return follows(1) && follows(2) && !overlong && !surrogate && !not_a_character ? 3 : 0;
  }
  if (first >= 0xF0u && first <= 0xF4u) {
    const bool overlong = first == 0xF0u && byte(1) < 0x90u, beyond = first == 0xF4u && byte(1) > 0x8Fu;
    return follows(1) && follows(2) && follows(3) && !overlong && !beyond ? 4 : 0;
  }
  return 0;
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    const char c = text[0];
    const bool control = bytes == 1 && ((static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7F);
    if (bytes == 0 || control)
      out += "\xEF\xBF\xBD";
    else if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (c == '\'')
      out += "&#39;";
    else
      out += text.substr(0, bytes);
    text.remove_prefix(std::max<std::size_t>(1, bytes));
  }
  return out;
}

}  // namespace weft::report
