// SPDX-License-Identifier: Apache-2.0
#include "report/html.hpp"

#include "base/text.hpp"

namespace weft::report {
namespace {

/// Can be written in a page: a character of Unicode, but no control character except those of layout.
bool is_printed(long code) {
  if (code == '\n' || code == '\t') return true;
  return code >= 0x20 && code != 0x7F && code != 0xFFFE && code != 0xFFFF;
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Character next = first_character(text);
    const char c = text[0];
    if (!is_printed(next.code))
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
      out += text.substr(0, next.bytes);
    text.remove_prefix(next.bytes);
  }
  return out;
}

}  // namespace weft::report
