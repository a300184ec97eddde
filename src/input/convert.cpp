// SPDX-License-Identifier: Apache-2.0
#include "input/convert.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "input/print.hpp"
#include "input/strings.hpp"

namespace weft::input {
namespace {

constexpr std::size_t kLongestList = 1024;

std::string expected(const Key& key) {
  constexpr const char* names[] = {"true or false", "an integer",        "a number",
                                   "a string",      "a list of strings", "a list of numbers"};
  if (key.choices.empty() || !std::holds_alternative<std::int64_t>(key.initial)) return names[key.initial.index()];
  return fmt::format("{} or \"{}\"", names[key.initial.index()], fmt::join(key.choices, "\", \""));
}

/// Checks a string and expands paths in place. Returns the problem, or "".
std::string check_text(const Key& key, std::string& text) {
  if (text.size() > kLongestText) return fmt::format("{} is longer than {} bytes", key.path(), kLongestText);
  if (!is_plain(text))
    return fmt::format("{} = {} has control characters or is not UTF-8", key.path(), input::quoted(text));
  if (key.is_path) {
    std::string problem;
    text = expand_environment(text, problem);
    if (!problem.empty()) return fmt::format("{}: {}", key.path(), problem);
    if (text.size() > kLongestText || !is_plain(text))
      return fmt::format("{} expands to {} (too long, with control characters, or not UTF-8)", key.path(),
                         input::quoted(text));
  }
  for (const auto& [name, advice] : key.retired_values)
    if (name == text)
      return fmt::format("{} = {} is of an earlier version; {}", key.path(), input::quoted(text), advice);
  if (!key.choices.empty() && std::find(key.choices.begin(), key.choices.end(), text) == key.choices.end()) {
    const std::string hint = nearest(text, key.choices);
    return fmt::format("{} = {} is not known (valid: \"{}\"){}", key.path(), input::quoted(text),
                       fmt::join(key.choices, "\", \""),
                       hint.empty() ? "" : fmt::format("; did you mean \"{}\"?", hint));
  }
  if (key.must_be_given && key.alternative.empty() && text.empty())
    return fmt::format("{} is empty (it has no default); {}", key.path(), key.help);
  return {};
}

bool in_range(const Key& key, double value) {
  if (key.minimum && (key.minimum->excluded ? !(value > key.minimum->value) : !(value >= key.minimum->value)))
    return false;
  if (key.maximum && (key.maximum->excluded ? !(value < key.maximum->value) : !(value <= key.maximum->value)))
    return false;
  return true;
}

}  // namespace

std::string what_is(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::string:
      return "the string " + input::quoted(node.as_string()->get());
    case toml::node_type::integer:
      return fmt::format("the integer {}", node.as_integer()->get());
    case toml::node_type::floating_point:
      return "the number " + toml_value(node.as_floating_point()->get());
    case toml::node_type::boolean:
      return node.as_boolean()->get() ? "true" : "false";
    case toml::node_type::array:
      return "a list";
    case toml::node_type::table:
      return "a table";
    default:
      return "a date or time";
  }
}

Value convert(const Key& key, const toml::node& node, std::string& problem) {
  const auto wrong_type = [&](std::string_view suggestion = "") {
    problem = fmt::format("{} must be {}, not {}{}", key.path(), expected(key), what_is(node), suggestion);
    return key.initial;
  };
  const auto ranged = [&](auto value) -> Value {
    if (!in_range(key, static_cast<double>(value)))
      problem = fmt::format("{} = {} is out of range (allowed: {}{})", key.path(), toml_value(value), range_text(key),
                            key.unit.empty() ? "" : "; unit: " + key.unit);
    return value;
  };
  if (std::holds_alternative<bool>(key.initial))
    return node.is_boolean() ? Value(node.as_boolean()->get()) : wrong_type();
  if (std::holds_alternative<std::int64_t>(key.initial)) {
    if (node.is_integer()) return ranged(node.as_integer()->get());
    if (node.is_string() && std::count(key.choices.begin(), key.choices.end(), node.as_string()->get()) > 0)
      return node.as_string()->get();
    const double number = node.is_floating_point() ? node.as_floating_point()->get() : 0.5;
    const bool whole = number == std::floor(number) && std::abs(number) <= 9007199254740992.0;  // 2^53
    return wrong_type(whole ? fmt::format("; write {}", static_cast<std::int64_t>(number)) : "");
  }
  if (std::holds_alternative<double>(key.initial)) {
    if (node.is_integer()) return ranged(static_cast<double>(node.as_integer()->get()));
    if (!node.is_floating_point()) return wrong_type();
    if (!std::isfinite(node.as_floating_point()->get())) return wrong_type(" (it must be finite)");
    return ranged(node.as_floating_point()->get());
  }
  if (std::holds_alternative<std::string>(key.initial)) {
    if (!node.is_string()) return wrong_type("; write strings in \"quotation marks\"");
    std::string text = node.as_string()->get();
    problem = check_text(key, text);
    return text;
  }
  if (!node.is_array()) return wrong_type("; write lists as [\"a\", \"b\"]");
  if (node.as_array()->size() > kLongestList) {
    problem = fmt::format("{} has more than {} entries", key.path(), kLongestList);
    return key.initial;
  }
  if (std::holds_alternative<std::vector<double>>(key.initial)) {
    std::vector<double> numbers;
    for (const toml::node& entry : *node.as_array()) {
      const std::optional<double> number = entry.value<double>();  // of integers too
      if (!number || !entry.is_number() || !std::isfinite(*number) || !in_range(key, *number)) {
        problem = fmt::format("{} must be a list of numbers{}, but has {}", key.path(),
                              range_text(key).empty() ? "" : fmt::format(" ({})", range_text(key)), what_is(entry));
        return key.initial;
      }
      numbers.push_back(*number);
    }
    return numbers;
  }
  std::vector<std::string> list;
  for (const toml::node& entry : *node.as_array()) {
    if (!entry.is_string()) {
      problem = fmt::format("{} must be a list of strings, but has {}", key.path(), what_is(entry));
      return key.initial;
    }
    list.push_back(entry.as_string()->get());
    problem = check_text(key, list.back());
    if (!problem.empty()) return key.initial;
  }
  return list;
}

}  // namespace weft::input
