// SPDX-License-Identifier: Apache-2.0
//
// JSON files as Weft writes them: non-finite numbers as strings, files replaced atomically.
#pragma once

#include <filesystem>
#include <string_view>

#include "base/json.hpp"

namespace weft::storage {

/// Writes a temporary file, syncs it and renames it to `path`: a reader sees the old file or the new one. Throws
/// Error(io).
void write_json(const std::filesystem::path& path, const Json& value);
/// Writes a file inside a PendingOutput, which syncs and publishes it. Throws Error(io).
void write_pending_json(const std::filesystem::path& path, const Json& value);
/// Writes a text that is already JSON, like `write_json`.
void write_json_text(const std::filesystem::path& path, std::string_view text);

}  // namespace weft::storage
