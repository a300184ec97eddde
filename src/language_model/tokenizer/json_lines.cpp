// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/json_lines.hpp"

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "base/json.hpp"
#include "dataset/tokens/token_set.hpp"
#include "storage/mapped_file.hpp"

namespace weft::language_model {
namespace {

constexpr int kLinesRead = 100;
constexpr std::size_t kLongestLine = std::size_t{1} << 20;
constexpr std::string_view kParquet = "PAR1";

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

/// In lower case, with its dot.
std::string extension_of(std::string_view path) {
  std::string extension = std::filesystem::path(path).extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return extension;
}

/// Throws Error(data) for a file of JSON Lines or Parquet, where texts are read as they are.
void require_plain_text(const std::string& path) {
  const storage::MappedFile file(path);
  const std::string_view text = file.text();
  if (text.starts_with(kParquet))
    throw error(ExitCode::data,
                "{0}: is Parquet, which is not read directly; convert it: weft prepare {0} --output OUT.jsonl", path);
  if (has_lines_of_objects(text))
    throw error(ExitCode::data,
                "{}: its lines are JSON objects (as text, their keys and quotation marks would be learned); name it "
                ".jsonl, or give data.format = \"jsonl\"",
                path);
}

}  // namespace

bool is_named_json_lines(std::string_view path) {
  const std::string extension = extension_of(path);
  return extension == ".jsonl" || extension == ".ndjson" || extension == ".json";
}

dataset::DataFormat format_by_name(const std::string& path) {
  if (const std::string extension = extension_of(path); extension == ".jsonl" || extension == ".ndjson")
    return dataset::DataFormat::jsonl;
  return std::filesystem::is_directory(path) || dataset::is_token_file(path) ? dataset::DataFormat::tokens
                                                                             : dataset::DataFormat::text;
}

dataset::DataFormat format_of(const std::string& path, std::string_view key, dataset::DataFormat declared) {
  using dataset::DataFormat;
  if (!std::filesystem::exists(path))
    throw error(ExitCode::usage, "{} = \"{}\": no such file or directory; correct the path", key, path);
  const DataFormat named = format_by_name(path);
  const DataFormat format = declared == DataFormat::by_name ? named : declared;
  if (format != named && (named != DataFormat::text || format == DataFormat::tokens))
    throw error(ExitCode::usage,
                "{} = \"{}\" and data.format = \"{}\" (by its name and first bytes the file is {}); "
                "remove data.format, or rename the file",
                key, path, name_of(format), name_of(named));
  if (format == DataFormat::text) require_plain_text(path);
  return format;
}

std::string_view name_of(dataset::DataFormat format) {
  using dataset::DataFormat;
  return format == DataFormat::text ? "text" : format == DataFormat::jsonl ? "jsonl" : "tokens";
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

}  // namespace weft::language_model
