// SPDX-License-Identifier: Apache-2.0
#include "base/text.hpp"

#include <fmt/format.h>

#include <limits>

namespace weft {
Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {1, lead};
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  long code = lead & (0xff >> (bytes + 1));
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  // Overlong forms, surrogates, beyond Unicode.
  constexpr long smallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < smallest[bytes] || (code >= 0xd800 && code <= 0xdfff) || code > 0x10ffff) return {};
  return {bytes, code};
}

std::size_t first_invalid(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    const Character next = first_character(text.substr(at));
    if (next.code < 0) return at;
    at += next.bytes;
  }
  return std::string_view::npos;
}

void append_character(std::string& text, long code) {
  const auto byte = [&](long value) { text += static_cast<char>(value); };
  const auto continuation = [&](int shift) { byte(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xc0 | code >> 6);
    continuation(0);
  } else if (code < 0x10000) {
    byte(0xe0 | code >> 12);
    continuation(6);
    continuation(0);
  } else {
    byte(0xf0 | code >> 18);
    continuation(12);
    continuation(6);
    continuation(0);
  }
}

namespace {

/// False for what a terminal may interpret: C0, DEL, C1, line separators, and marks that change the direction of text.
bool harmless(long code) {
  return code >= 0x20 && !(code >= 0x7f && code < 0xa0) && code != 0x61c && !(code >= 0x200e && code <= 0x200f) &&
         !(code >= 0x2028 && code <= 0x202e) && !(code >= 0x2066 && code <= 0x2069) && code != 0xfeff;
}

std::string escaped(std::string_view text, std::size_t at_most, bool lines) {
  std::string out;
  while (!text.empty()) {
    if (out.size() >= at_most) return out + "…";
    const Character next = first_character(text);
    if (harmless(next.code) || (lines && (next.code == '\n' || next.code == '\t')))
      out += text.substr(0, next.bytes);
    else
      for (std::size_t i = 0; i < next.bytes; ++i) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
    text.remove_prefix(next.bytes);
  }
  return out;
}

}  // namespace

std::string printable(std::string_view text, std::size_t at_most) { return escaped(text, at_most, false); }

std::string printable_lines(std::string_view text) {
  return escaped(text, std::numeric_limits<std::size_t>::max(), true);
}

}  // namespace weft
