// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/lines.hpp"

#include <filesystem>

#include "base/error.hpp"
#include "language_model/tokenizer/json_lines.hpp"
#include "language_model/tokenizer/json_rows.hpp"
#include "storage/mapped_file.hpp"

namespace weft::language_model {
namespace {

constexpr std::int64_t kLargestTextFile = std::int64_t{256} << 20, kMostPromptLines = std::int64_t{1} << 20;

std::string prompt_of_segments(SortedJson& object, const std::string& source) {
  JsonRow row;
  if (const std::string why = take_row(object, row); !why.empty())
    throw error(ExitCode::data, "{}: {}; correct the line", source, why);
  if (!row.borders.empty()) row.text.resize(row.borders.front());
  return row.text;
}

}  // namespace

std::string text_of_file(const std::string& path, std::string_view origin) {
  if (!std::filesystem::exists(path))
    throw error(ExitCode::usage, "{}: no such file ({}); correct the path", path, origin);
  const storage::MappedFile file(path);
  if (std::ssize(file.bytes()) > kLargestTextFile)
    throw error(ExitCode::data, "{}: {} bytes (at most {} are read); divide the file", path, file.bytes().size(),
                kLargestTextFile);
  return std::string(file.text());
}

SortedJson object_of(std::string_view line, const std::string& source) {
  SortedJson object = parse_json<SortedJson>(line);
  if (!object.is_object())
    throw error(ExitCode::data, "{}: not a JSON object; one per line is needed, correct the line", source);
  return object;
}

std::string string_of(const SortedJson& object, const char* key, const std::string& source, std::string missing) {
  const auto found = object.find(key);
  if (found == object.end()) return missing;
  if (!found->is_string()) throw error(ExitCode::data, "{}: \"{}\" is not a string; correct the line", source, key);
  return found->get<std::string>();
}

std::vector<PromptLine> prompt_lines(std::string_view text, const std::string& path) {
  const bool objects = holds_json_lines(text, path);
  std::vector<PromptLine> prompts;
  each_line(text, path, [&](std::string_view line, const std::string& source) {
    PromptLine prompt{.text = std::string(line), .reference = "", .source = source};
    if (objects) {
      SortedJson object = object_of(line, source);
      if (is_conversation(object))
        throw error(ExitCode::data,
                    "{}: is a conversation, which becomes a text by the chat template of its model; convert the file: "
                    "weft prepare {} --model DIRECTORY --generation-prompt --output OUT.jsonl",
                    source, path);
      prompt.rendered = object.contains("segments");
      prompt.text = prompt.rendered ? prompt_of_segments(object, source) : string_of(object, "prompt", source);
      prompt.reference = string_of(object, "reference", source);
    }
    if (prompt.text.empty())
      throw error(ExitCode::data, "{}: the prompt is empty (a text begins with at least one token); {}", source,
                  objects ? "give a string \"prompt\", or remove the line" : "remove the line");
    if (std::ssize(prompts) == kMostPromptLines)
      throw error(ExitCode::data, "{}: more than {} prompts; divide the file", path, kMostPromptLines);
    prompts.push_back(std::move(prompt));
  });
  return prompts;
}

}  // namespace weft::language_model
