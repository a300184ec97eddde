// SPDX-License-Identifier: Apache-2.0
//
// UTF-8, and text of foreign origin (attributes, JSON strings, file names) in messages: it must neither control the
// terminal nor imitate other lines of the log.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace weft {

/// A character at the start of a text: its bytes, 1 if they are not valid UTF-8, and its code point (-1: invalid).
struct Character {
  std::size_t bytes = 1;
  long code = -1;
};
/// The first character of a text that is not empty.
Character first_character(std::string_view text);
/// Offset of the first byte that is not valid UTF-8 (RFC 3629: no overlong forms, no surrogates); npos if there is
/// none.
std::size_t first_invalid(std::string_view text);
/// Appends the UTF-8 form of a code point, which must be valid.
void append_character(std::string& text, long code);

/// One line of at most about `at_most` bytes: control characters, directional overrides and invalid UTF-8 as \xNN, the
/// rest of a longer text as "…".
std::string printable(std::string_view text, std::size_t at_most = 200);

/// Makes a whole message printable like `printable`, but keeps newlines, tabs and its length.
std::string printable_lines(std::string_view text);

}  // namespace weft
