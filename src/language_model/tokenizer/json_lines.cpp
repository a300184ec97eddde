// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/json_lines.hpp"

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "base/json.hpp"
#include "storage/mapped_file.hpp"

namespace weft::language_model {
namespace {

constexpr int kLinesRead = 100;
constexpr std::size_t kLongestLine = std::size_t{1} << 20;

bool is_object(std::string_view line) {
  return line.starts_with('{') && line.size() <= kLongestLine && parse_json<SortedJson>(line).is_object();
}

/// True if each of the first lines that are not blank is an object, and there is one. The file may begin with a byte
/// order mark, and the objects may be the elements of an array, one per line.
bool has_lines_of_objects(std::string_view text) {
  bool found = false;
  if (constexpr std::string_view kMark = "\xef\xbb\xbf"; text.starts_with(kMark)) text.remove_prefix(kMark.size());
  for (int read = 0; read < kLinesRead && !text.empty();) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    line.remove_prefix(std::min(line.find_first_not_of(" \t\r"), line.size()));
    line = line.substr(0, line.find_last_not_of(" \t\r,") + 1);
    if (line.empty() || line == "[" || line == "]") continue;
    if (!is_object(line)) return false;
    found = true;
    ++read;
  }
  return found;
}

}  // namespace

bool is_named_json_lines(std::string_view path) {
  std::string extension = std::filesystem::path(path).extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return extension == ".jsonl" || extension == ".ndjson" || extension == ".json";
}

bool holds_json_lines(std::string_view text, std::string_view path) {
  if (is_named_json_lines(path)) return true;
  if (has_lines_of_objects(text))
    throw error(ExitCode::data,
                "{}: its lines are JSON objects (files of other names than .jsonl, .ndjson and .json have plain text); "
                "rename it",
                path);
  return false;
}

void require_plain_text(const std::string& path) {
  const bool named = is_named_json_lines(path) && !path.ends_with(".json") && !path.ends_with(".JSON");
  const auto refuse = [&] {
    return error(ExitCode::data,
                 "{}: is JSON Lines, which is not read as text yet (its keys and quotation marks would be learned); "
                 "write the texts to a text file, or make token files of them",
                 path);
  };
  if (named) throw refuse();
  const storage::MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  if (has_lines_of_objects(text)) throw refuse();
}

}  // namespace weft::language_model
