// SPDX-License-Identifier: Apache-2.0
//
// Text of foreign origin (attributes, JSON strings, file names) in messages: it must neither control the terminal nor
// imitate other lines of the log.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace weft {

/// One line of at most about `at_most` bytes: control characters, directional overrides and invalid UTF-8 as \xNN, the
/// rest of a longer text as "…".
std::string printable(std::string_view text, std::size_t at_most = 200);

/// The same for a whole message: keeps newlines, tabs and its length.
std::string printable_lines(std::string_view text);

}  // namespace weft
