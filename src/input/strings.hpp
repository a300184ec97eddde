// SPDX-License-Identifier: Apache-2.0
//
// String functions of this module.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace weft::input {

/// `text` in quotation marks for one line of a message. Control characters and invalid UTF-8 are replaced by "?";
/// output beyond `longest` bytes is truncated.
std::string quoted(std::string_view text, std::size_t longest = 60);

/// True for valid UTF-8 without control characters: can be printed and written as TOML and JSON.
bool is_plain(std::string_view text);

/// Replaces ${NAME} by the environment variable and $${ by ${. On failure sets `problem` and returns "".
std::string expand_environment(std::string_view text, std::string& problem);
/// Escapes ${ as $${, so that `expand_environment` restores the text.
std::string protect_from_expansion(std::string_view text);

std::string_view trim(std::string_view text);

/// The element of `names` nearest to `word` by edit distance (insert, delete, replace, swap); "" if none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& names);

}  // namespace weft::input
