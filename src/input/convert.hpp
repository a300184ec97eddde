// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <toml++/toml.h>

#include <string>

#include "input/schema.hpp"

namespace weft::input {

constexpr std::size_t kLongestText = 4096;  ///< bytes of a string after expansion: the longest path

/// What a node is, for messages: "the integer 3", "a list".
std::string what_is(const toml::node& node);

/// The node as a value of the key's type, after the checks of this key. Sets `problem` if one fails.
Value convert(const Key& key, const toml::node& node, std::string& problem);

}  // namespace weft::input
