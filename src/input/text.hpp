// SPDX-License-Identifier: Apache-2.0
//
// Small text functions of this room.
#pragma once

#include <string>
#include <string_view>

namespace weft::input {

/// `text` between quotation marks, fit for one line of a message: control characters and what is no UTF-8 become "?",
/// and what is longer than `longest` bytes is cut.
std::string quoted(std::string_view text, std::size_t longest = 60);

/// No control characters, valid UTF-8: can be printed, written as TOML and as JSON.
bool is_plain(std::string_view text);

/// ${NAME} -> the environment variable, $${ -> ${. On failure `problem` says why and the result is empty.
std::string expand_environment(std::string_view text, std::string& problem);
/// The inverse for a text without variables: ${ -> $${.
std::string protect_from_expansion(std::string_view text);

std::string_view trim(std::string_view text);

}  // namespace weft::input
