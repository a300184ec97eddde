// SPDX-License-Identifier: Apache-2.0
#include "input/strings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "base/text.hpp"

namespace weft::input {
namespace {

bool is_control(long code) { return code < 0x20 || code == 0x7F; }  // or no character

bool is_name_character(char c, bool first) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_' || (!first && c >= '0' && c <= '9');
}

}  // namespace

std::string quoted(std::string_view text, std::size_t longest) {
  std::string out = "\"";
  while (!text.empty()) {
    const Character next = first_character(text);
    if (out.size() + next.bytes > longest) return out + "…\"";
    if (is_control(next.code))
      out += '?';
    else
      out += text.substr(0, next.bytes);
    text.remove_prefix(next.bytes);
  }
  return out + "\"";
}

bool is_plain(std::string_view text) {
  while (!text.empty()) {
    const Character next = first_character(text);
    if (is_control(next.code)) return false;
    text.remove_prefix(next.bytes);
  }
  return true;
}

std::string expand_environment(std::string_view text, std::string& problem) {
  std::string out;
  std::size_t i = 0;
  while (i < text.size()) {
    if (text.substr(i, 3) == "$${") {
      out += "${";
      i += 3;
    } else if (text.substr(i, 2) == "${") {
      std::size_t end = i + 2;
      while (end < text.size() && is_name_character(text[end], end == i + 2)) ++end;
      if (end == i + 2 || end == text.size() || text[end] != '}') {
        problem = fmt::format(
            "{} has a \"${{\" without a name and \"}}\" (environment variables are written ${{NAME}}); write $${{ for "
            "a "
            "literal ${{",
            quoted(text));
        return {};
      }
      const std::string name(text.substr(i + 2, end - i - 2));
      const char* value = std::getenv(name.c_str());
      if (value == nullptr || *value == '\0') {  // empty counts as unset
        problem = fmt::format("environment variable {} is not set (used in {}); set it or give the full path", name,
                              quoted(text));
        return {};
      }
      out += value;
      i = end + 1;
    } else {
      out += text[i++];
    }
  }
  return out;
}

std::string protect_from_expansion(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i, 2) == "${") out += '$';
    out += text[i];
  }
  return out;
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view blank = " \t";
  const std::size_t begin = text.find_first_not_of(blank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(blank) - begin + 1);
}

namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

/// Number of insertions, deletions, replacements and swaps of neighbours that turn a into b.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> before, previous(b.size() + 1), current(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) previous[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        current[j] = std::min(current[j], before[j - 2] + 1);
    }
    before = previous;
    std::swap(previous, current);
  }
  return previous[b.size()];
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& names) {
  constexpr std::size_t longest = 64;  // longer words are not misspelt names; bounds the time
  if (word.empty() || word.size() > longest) return {};
  const std::string wanted = lower(word);
  // A third of the letters may differ, at most three: more is another word, not a misspelt one.
  const std::size_t allowed = wanted.size() < 3 ? 0 : std::clamp<std::size_t>(wanted.size() / 3, 1, 3);
  std::string best;
  std::size_t smallest = allowed + 1;
  for (const std::string& name : names) {
    const std::size_t distance = edit_distance(wanted, lower(name));
    if (distance < smallest) {
      smallest = distance;
      best = name;
    }
  }
  if (!best.empty() || wanted.size() < 3) return best;
  // Part of a name ("out" of "output"), best its beginning; or more than a name ("seed_value").
  for (const std::string& name : names)
    if (lower(name).starts_with(wanted)) return name;
  for (const std::string& name : names)
    if (lower(name).find(wanted) != std::string::npos || wanted.starts_with(lower(name) + "_")) return name;
  return {};
}

}  // namespace weft::input
