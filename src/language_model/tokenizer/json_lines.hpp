// SPDX-License-Identifier: Apache-2.0
//
// Files of JSON objects, one per line, are recognised by their names, whatever the case of letters, and by their
// contents.
#pragma once

#include <string>
#include <string_view>

namespace weft::language_model {

/// True for a path NAME.jsonl, NAME.ndjson or NAME.json.
bool is_named_json_lines(std::string_view path);

/// True if a file of prompts or answers is read as JSON Lines, by its name. Throws Error(data) for another name
/// if each of the first lines is an object, since such lines are hardly meant as plain text.
bool holds_json_lines(std::string_view text, std::string_view path);

/// Throws Error(data) for a file of JSON Lines, where texts are read as they are. Throws for a file that cannot be
/// read.
void require_plain_text(const std::string& path);

}  // namespace weft::language_model
