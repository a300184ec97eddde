// SPDX-License-Identifier: Apache-2.0
//
// Files of JSON objects, one per line, are recognised by their names, whatever the case of letters, and by their
// contents.
#pragma once

#include <string>
#include <string_view>

#include "dataset/tokens/token_settings.hpp"

namespace weft::language_model {

/// True for a path NAME.jsonl, NAME.ndjson or NAME.json.
bool is_named_json_lines(std::string_view path);

/// True if a file of prompts or answers is read as JSON Lines, by its name. Throws Error(data) for another name
/// if each of the first lines is an object, since such lines are hardly meant as plain text.
bool holds_json_lines(std::string_view text, std::string_view path);

/// text, jsonl or tokens, by the name of a path and the first bytes of a file: FILE.jsonl and FILE.ndjson are jsonl;
/// directories, FILE.h5, FILE.hdf5 and FILE.bin tokens. Throws for a file that cannot be read.
dataset::DataFormat format_by_name(const std::string& path);

/// The format of a path, as declared or by name. `key` names the path in messages. Throws Error(usage) if it does not
/// exist or has another format than the declared one, Error(data) for text that is JSON Lines or Parquet.
dataset::DataFormat format_of(const std::string& path, std::string_view key, dataset::DataFormat declared);

/// As in data.format.
std::string_view name_of(dataset::DataFormat);

}  // namespace weft::language_model
