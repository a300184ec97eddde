// SPDX-License-Identifier: Apache-2.0
//
// TOML text -> the members of a schema. Every problem is found and told at once, each as
//
//   file:line:col: problem (why) suggestion          from the input file
//   --set table.key=value: problem (why) suggestion  from an override
//
// The text is not trusted: its size, its nesting and the number of problems told are bounded.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "input/schema.hpp"

namespace weft::input {

constexpr std::int64_t kLargestInput = std::int64_t{1} << 20;  ///< bytes of an input file

/// The text of an input file. Throws Error(usage) when it cannot be read or is larger than kLargestInput.
std::string load_text(const std::string& path);

/// One "table.key=value" that replaces what the file says. The value is TOML; a bare word is taken as text.
struct Override {
  std::string assignment;
  std::string origin;  ///< how messages name it; "" = "--set <assignment>"
};

/// "path = value" with the value quoted as TOML text, whatever is in it.
Override override_text(std::string_view path, std::string_view text, std::string_view origin);

/// Sets each key's member to the override, the file's value or the default, then checks the rules. Throws one
/// collective Error(usage) with a line for each problem; the members then hold nothing useful.
void read(const Schema& schema, std::string_view text, const std::string& file_name,
          const std::vector<Override>& overrides = {});

/// A key whose value differs between two runs.
struct Change {
  std::string path;
  std::string before, after;  ///< TOML values
  Resume resume;
};

/// Keys of class fixed or changeable whose present value differs from `old_text` (a resolved input; a key that it lacks
/// had its default). Throws Error(usage) when the old text cannot be read.
std::vector<Change> changed_keys(const Schema& schema, std::string_view old_text, const std::string& old_name);

/// The nearest of `names` to `word` by edit distance (insert, delete, replace, swap), "" when none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& names);

}  // namespace weft::input
