// SPDX-License-Identifier: Apache-2.0
//
// Files of lines, and of JSON objects, one per line.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.hpp"

namespace weft::language_model {

/// The text of a file. origin: the key or option that names the file. Throws Error(usage) if it does not exist,
/// Error(data) if it is empty, larger than 256 MiB, or not a regular file.
std::string text_of_file(const std::string& path, std::string_view origin);

/// Calls body(line without its end, "PATH:NUMBER") for each line of the text of a file.
template <class Body>
void each_line(std::string_view text, const std::string& path, const Body& body) {
  for (std::int64_t number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    body(line, path + ":" + std::to_string(number));
  }
}

/// The object of a line. Throws Error(data) that begins with `source`.
SortedJson object_of(std::string_view line, const std::string& source);

/// A string of an object; `missing` if there is none. Throws Error(data) that begins with `source`.
std::string string_of(const SortedJson& object, const char* key, const std::string& source, std::string missing = "");

struct PromptLine {
  std::string text;       ///< not empty
  std::string reference;  ///< the answer that is right; "": none is known
  std::string source;     ///< "PATH:NUMBER"
  bool rendered = false;  ///< by a chat template, which has the symbols that begin a text
};

/// Prompts of a text, one per line; in a file of JSON Lines (tokenizer/json_lines.hpp) each line is an object with a
/// string "prompt", or with "segments", whose text before the first that counts in the loss is the prompt
/// (tokenizer/json_rows.hpp), and a string "reference" if there is one. Throws Error(data) that begins with the line;
/// at most 2^20 prompts.
std::vector<PromptLine> prompt_lines(std::string_view text, const std::string& path);

}  // namespace weft::language_model
