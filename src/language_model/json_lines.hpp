// SPDX-License-Identifier: Apache-2.0
//
// Files of lines, and of JSON objects, one per line.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/json.hpp"
#include "storage/mapped_file.hpp"

namespace weft::language_model {

/// body(line without its end, "PATH:NUMBER") for each line of a file. origin: the key or option that names the file.
/// Throws Error(usage) if it does not exist, Error(data) if it is empty or not a regular file.
template <class Body>
void each_line(const std::string& path, std::string_view origin, const Body& body) {
  if (!std::filesystem::exists(path))
    throw error(ExitCode::usage, "{} = \"{}\": no such file; correct the path", origin, path);
  const storage::MappedFile file(path);
  std::string_view rest(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  for (std::int64_t number = 1; !rest.empty(); ++number) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    body(line, fmt::format("{}:{}", path, number));
  }
}

/// The object of a line. Throws Error(data) that begins with `source`.
inline SortedJson object_of(std::string_view line, const std::string& source) {
  SortedJson object = parse_json<SortedJson>(line);
  if (!object.is_object())
    throw error(ExitCode::data, "{}: not a JSON object; one per line is needed, correct the line", source);
  return object;
}

/// A string of an object; `missing` if there is none. Throws Error(data) that begins with `source`.
inline std::string string_of(const SortedJson& object, const char* key, const std::string& source,
                             std::string missing = "") {
  const auto found = object.find(key);
  if (found == object.end()) return missing;
  if (!found->is_string()) throw error(ExitCode::data, "{}: \"{}\" is not a string; correct the line", source, key);
  return found->get<std::string>();
}

}  // namespace weft::language_model
