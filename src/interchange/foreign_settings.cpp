// SPDX-License-Identifier: Apache-2.0
#include "interchange/foreign_settings.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "storage/durable.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kLargestConfig = std::int64_t{1} << 20, kLargestCount = std::int64_t{1} << 28;

std::string read_config(const fs::path& path) {
  const Descriptor file = open_regular(path, ExitCode::data);
  return storage::read_text(file, path, kLargestConfig);
}

[[noreturn]] void refuse_key(const fs::path& path, const std::string& key) {
  throw error(ExitCode::usage,
              "{}: key \"{}\" is not known (it may change what the model computes); if it does not, remove it",
              path.string(), printable(key));
}

/// Removes quotes or, if there are none, a comment.
std::string unquoted(std::string text) {
  const auto trim = [&] {
    while (!text.empty() && (text.back() == ' ' || text.back() == '\r')) text.pop_back();
    text.erase(0, std::min(text.find_first_not_of(' '), text.size()));
  };
  trim();
  if (text.size() >= 2 && (text.front() == '"' || text.front() == '\'') && text.back() == text.front())
    return text.substr(1, text.size() - 2);
  if (const std::size_t comment = text.find(" #"); comment != text.npos) text.resize(comment);
  trim();
  return text;
}

}  // namespace

ForeignSettings::ForeignSettings(const fs::path& path) : path_(path), root_(json_object(path)) {}

const SortedJson& ForeignSettings::value(const char* key) {
  static const SortedJson absent;
  known_.insert(key);
  const auto at = root_.find(key);
  return at == root_.end() ? absent : *at;
}

bool ForeignSettings::has(const char* key) { return !value(key).is_null(); }

std::string ForeignSettings::text(const char* key, const std::string& otherwise) {
  const SortedJson& found = value(key);
  if (found.is_null()) return otherwise;
  if (!found.is_string()) throw error(ExitCode::data, "{}: \"{}\" is not a text", path_.string(), key);
  return found.get<std::string>();
}

bool ForeignSettings::flag(const char* key, bool otherwise) {
  const SortedJson& found = value(key);
  if (found.is_null()) return otherwise;
  if (!found.is_boolean()) throw error(ExitCode::data, "{}: \"{}\" is not true or false", path_.string(), key);
  return found.get<bool>();
}

std::int64_t ForeignSettings::count(const char* key) {
  const SortedJson& found = value(key);
  if (!found.is_number_unsigned() || found.get<std::uint64_t>() < 1 ||
      found.get<std::uint64_t>() > static_cast<std::uint64_t>(kLargestCount))
    throw error(ExitCode::data, "{}: \"{}\" is missing or not a positive integer", path_.string(), key);
  return found.get<std::int64_t>();
}

std::optional<std::int64_t> ForeignSettings::optional_count(const char* key) {
  return has(key) ? std::optional(count(key)) : std::nullopt;
}

void ForeignSettings::require_equal(const char* key, std::int64_t expected) {
  if (const std::optional<std::int64_t> stated = optional_count(key); stated && *stated != expected)
    throw error(ExitCode::data, "{}: \"{}\" is {}, the tensors have {}; is a file of weights missing?", path_.string(),
                key, *stated, expected);
}

void ForeignSettings::refuse(std::string_view what) const {
  throw error(ExitCode::usage, "{}: {}; Weft cannot read this model", path_.string(), what);
}

void ForeignSettings::finish() const {
  for (const auto& [key, found] : root_.items())
    if (!found.is_null() && known_.find(key) == known_.end()) refuse_key(path_, key);
}

std::map<std::string, std::string> yaml_scalars(const fs::path& path) {
  const std::string text = read_config(path);
  std::map<std::string, std::string> scalars;
  std::map<std::string, std::int64_t> items;                 // number of items of each list so far
  std::vector<std::pair<std::size_t, std::string>> parents;  // indentation and path of the open mappings
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    const std::size_t indent = line.find_first_not_of(' ');
    if (indent == line.npos || line[indent] == '#') continue;
    if (line[indent] == '-') {
      // The items of a list may stand as far to the left as its key.
      while (!parents.empty() && parents.back().first > indent) parents.pop_back();
      if (parents.empty()) continue;
      const std::string& list = parents.back().second;
      scalars[fmt::format("{}.{}", list, items[list]++)] = unquoted(line.substr(indent + 1));
      continue;
    }
    const std::size_t colon = line.find(':', indent);
    if (colon == line.npos || (colon + 1 < line.size() && line[colon + 1] != ' ' && line[colon + 1] != '\r')) continue;
    while (!parents.empty() && parents.back().first >= indent) parents.pop_back();
    const std::string key =
        (parents.empty() ? "" : parents.back().second + ".") + unquoted(line.substr(indent, colon - indent));
    const std::string value = unquoted(line.substr(colon + 1));
    if (value.empty())
      parents.emplace_back(indent, key);
    else
      scalars[key] = value;
  }
  return scalars;
}

void require_known(const fs::path& path, const std::map<std::string, std::string>& scalars,
                   std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : scalars)
    if (value != "null" && value != "~" && std::find(known.begin(), known.end(), key) == known.end())
      refuse_key(path, key);
}

SortedJson json_object(const fs::path& path) {
  SortedJson parsed = parse_json<SortedJson>(read_config(path));
  if (parsed.is_discarded() || !parsed.is_object())
    throw error(ExitCode::data, "{}: is not a JSON object; is it truncated?", path.string());
  return parsed;
}

}  // namespace weft::interchange
