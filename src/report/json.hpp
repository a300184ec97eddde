// SPDX-License-Identifier: Apache-2.0
//
// JSON files as Weft writes them: numbers that are not finite as texts, and never a half-written file.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace weft::report {

using Json = nlohmann::ordered_json;

/// The same with every non-finite number as "nan", "inf" or "-inf": JSON has none, and null would hide what happened.
Json with_finite_numbers(Json value);

/// One line, or indented by `indent` >= 0. Bytes that are no UTF-8 (a file name) are replaced.
std::string to_text(const Json& value, int indent = -1);

/// Writes beside `path`, syncs, renames: a reader sees the old file or the new one. Throws Error(io).
void write_json(const std::filesystem::path& path, const Json& value);

}  // namespace weft::report
