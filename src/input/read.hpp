// SPDX-License-Identifier: Apache-2.0
//
// Reads TOML text into the members of a schema. All problems are reported at once, each as
//
//   file:line:col: problem (why) suggestion          from the input file
//   --set table.key=value: problem (why) suggestion  from an override
//
// The text is not trusted: its size, its nesting and the number of reported problems are bounded.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "input/schema.hpp"

namespace weft::input {

constexpr std::int64_t kLargestInput = std::int64_t{1} << 20;  ///< bytes of an input file

/// The text of an input file. Throws Error(usage) if it cannot be read or is larger than kLargestInput.
std::string load_text(const std::string& path);

/// True if the text is TOML with a table of this name.
bool has_table(std::string_view text, std::string_view table);

/// One "table.key=value" that replaces the value of the file. The value is TOML; a bare word is a string.
struct Override {
  std::string assignment;
  std::string origin;  ///< name in messages; "" = "--set <assignment>"
};

/// The override "path=text" with `text` quoted as a TOML string.
Override override_text(std::string_view path, std::string_view text, std::string_view origin);

/// The writer of an input. A resolved input in a checkpoint may be of an earlier version: keys may then have their
/// former names, and retired ones are skipped, as are retired values of keys that are not fixed.
enum class Writer { user, checkpoint };

/// Sets the member of each key to the override, the value of the file or the default, then checks the rules. Throws one
/// collective Error(usage) with one line per problem; the members are then unspecified.
void read(const Schema& schema, std::string_view text, const std::string& file_name,
          const std::vector<Override>& overrides = {}, Writer writer = Writer::user);

/// Throws a collective Error(usage) if a fixed key has a retired value in `old_text`, a resolved input: this version
/// does not have its model. Throws Error(usage) if the text cannot be parsed.
void require_current(const Schema& schema, std::string_view old_text, const std::string& old_name);

/// A key whose value differs between two runs.
struct Change {
  std::string path;
  std::string before, after;  ///< TOML values
  Resume resume;
};

/// Keys of class fixed or changeable whose current value differs from `old_text`, a resolved input. Keys missing in
/// `old_text` had their default. Throws as require_current does.
std::vector<Change> changed_keys(const Schema& schema, std::string_view old_text, const std::string& old_name);

/// The value of the key `path` in `old_text`, a resolved input; the key's default if it is not there or not accepted.
/// Throws Error(usage) if the text cannot be parsed.
Value value_in(const Schema& schema, std::string_view path, std::string_view old_text, const std::string& old_name);

}  // namespace weft::input
