// SPDX-License-Identifier: Apache-2.0
//
// JSON files as Weft writes them: non-finite numbers as strings, files replaced atomically.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/json.hpp"

namespace weft::report {

using weft::Json;

/// The value with each non-finite number as "nan", "inf" or "-inf": JSON has none, and null would hide the cause.
Json with_finite_numbers(Json value);

/// One line, or indented by `indent` >= 0. Invalid UTF-8 (in a file name) is replaced.
std::string to_text(const Json& value, int indent = -1);

/// Writes a temporary file, syncs it and renames it to `path`: a reader sees the old file or the new one. Throws
/// Error(io).
void write_json(const std::filesystem::path& path, const Json& value);
/// Writes a text that is already JSON, like `write_json`.
void write_json_text(const std::filesystem::path& path, std::string_view text);

}  // namespace weft::report
