// SPDX-License-Identifier: Apache-2.0
//
// UTF-8, and text of foreign origin (attributes, JSON strings, file names) in messages: it must neither control the
// terminal nor imitate other lines of the log.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace weft {

/// The UTF-8 character at the start of a text that is not empty: its bytes and its code point; 1 byte and -1 if the
/// text does not begin with a valid one (overlong forms, surrogates and numbers beyond Unicode are not valid).
struct Character {
  std::size_t bytes = 1;
  long code = -1;
};
Character first_character(std::string_view text);

/// One line of at most about `at_most` bytes: control characters, directional overrides and invalid UTF-8 as \xNN, the
/// rest of a longer text as "…".
std::string printable(std::string_view text, std::size_t at_most = 200);

/// The same for a whole message: keeps newlines, tabs and its length.
std::string printable_lines(std::string_view text);

}  // namespace weft
