// SPDX-License-Identifier: Apache-2.0
#include "input/print.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/json.hpp"
#include "input/strings.hpp"

namespace weft::input {
namespace {

std::string quote(const std::string& text) {
  std::string out(1, '"');
  for (const char c : text) {
    const unsigned byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\u{:04X}", byte);
    } else {
      out += c;
    }
  }
  out += '"';
  return out;
}

std::string toml_of(const Key& key, const Value& value) {
  if (!key.is_path) return toml_value(value);
  if (const auto* const path = std::get_if<std::string>(&value)) return toml_value(protect_from_expansion(*path));
  std::vector<std::string> paths = std::get<std::vector<std::string>>(value);
  for (std::string& path : paths) path = protect_from_expansion(path);
  return toml_value(paths);
}

/// "", or what the key needs of others: "; only with transcoder.decoder = "tied_target"".
std::string conditions_text(const Key& key) {
  std::string text;
  for (const Condition& condition : key.conditions) {
    constexpr const char* kinds[] = {"only with", "not with", "only with, and required with,"};
    text += fmt::format("; {} {}", kinds[static_cast<int>(condition.kind)], text_of(condition));
  }
  return text;
}

/// "largest learning rate [unit]; at least …"
std::string description(const Key& key) {
  std::string text = key.help;
  if (!key.unit.empty()) text += fmt::format(" [{}]", key.unit);
  if (const std::string range = range_text(key); !range.empty())
    text += fmt::format(
        "; {}{}", key.choices.empty() || std::holds_alternative<std::int64_t>(key.initial) ? "" : "one of ", range);
  return text + conditions_text(key);
}

/// Escaped for a cell of a Markdown table.
std::string markdown(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c;
  }
  return out;
}

/// The keys of a table, one row each.
std::string keys_markdown(const Schema& schema, const Table& table) {
  std::string out = "| key | type | default | allowed | unit | on resume | meaning |\n|---|---|---|---|---|---|---|\n";
  for (const Key& key : schema.keys()) {
    if (key.table != table.name) continue;
    constexpr const char* on_resume[] = {"fixed", "free", "with `resume.accept_changed`"};
    out += fmt::format("| `{}` | {} | {} | {} | {} | {} | {} |\n", key.name, type_name(key),
                       key.must_be_given ? "required"
                       : key.derive      ? markdown(key.derivation)
                                         : fmt::format("`{}`", markdown(toml_of(key, key.initial))),
                       markdown(range_text(key)), key.unit, on_resume[static_cast<int>(key.resume)],
                       markdown(key.help + conditions_text(key)));
  }
  return out;
}

}  // namespace

std::string toml_value(const Value& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* integer = std::get_if<std::int64_t>(&value)) return fmt::format("{}", *integer);
  if (const auto* number = std::get_if<double>(&value)) {
    std::string text = fmt::format("{}", *number);
    if (text.find_first_of(".eni") == std::string::npos) text += ".0";  // otherwise it would be an integer in TOML
    return text;
  }
  if (const auto* text = std::get_if<std::string>(&value)) return quote(*text);
  std::vector<std::string> entries;
  if (const auto* numbers = std::get_if<std::vector<double>>(&value)) {
    for (const double number : *numbers) entries.push_back(toml_value(number));
  } else {
    for (const std::string& entry : std::get<std::vector<std::string>>(value)) entries.push_back(quote(entry));
  }
  return fmt::format("[{}]", fmt::join(entries, ", "));
}

std::string type_name(const Key& key) {
  if (!key.choices.empty() && std::holds_alternative<std::string>(key.initial)) return "name";
  if (key.is_path) return std::holds_alternative<std::string>(key.initial) ? "path" : "list of paths";
  constexpr const char* names[] = {"true or false", "integer",         "number",
                                   "string",        "list of strings", "list of numbers"};
  return names[key.initial.index()];
}

std::string range_text(const Key& key) {
  const std::string words = key.choices.empty() ? "" : fmt::format("\"{}\"", fmt::join(key.choices, "\", \""));
  if (!words.empty() && !std::holds_alternative<std::int64_t>(key.initial)) return words;
  std::string text;
  if (key.minimum) text = fmt::format("{} {}", key.minimum->excluded ? "more than" : "at least", key.minimum->value);
  if (key.minimum && key.maximum) text += ", ";
  if (key.maximum) text += fmt::format("{} {}", key.maximum->excluded ? "less than" : "at most", key.maximum->value);
  if (!words.empty()) text += (text.empty() ? "" : ", or ") + words;
  return text;
}

std::string print(const Schema& schema) {
  std::string out;
  for (const Table& table : schema.tables()) {
    out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", table.name);
    for (const Key& key : schema.keys())
      if (key.table == table.name) out += fmt::format("{} = {}\n", key.name, toml_of(key, key.load()));
  }
  return out;
}

std::string defaults(const Schema& schema) {
  std::string out =
      "# Every key of an input with its default. Keep only the lines that you change; all other keys have their "
      "defaults.\n";
  for (const Table& table : schema.tables()) {
    out += '\n';
    if (!table.help.empty()) out += fmt::format("# {}\n", table.help);
    out += fmt::format("[{}]\n", table.name);
    for (const Key& key : schema.keys()) {
      if (key.table != table.name) continue;
      if (key.derive)
        out += fmt::format("# {}; default: {}\n# {} = {}\n", description(key), key.derivation, key.name,
                           toml_of(key, key.initial));
      else
        out += fmt::format("# {}{}\n{} = {}\n", description(key), key.must_be_given ? " (required: no default)" : "",
                           key.name, key.must_be_given ? key.example : toml_of(key, key.initial));
    }
  }
  return out;
}

Json to_json(const Schema& schema) {
  Json out = Json::object();
  for (const Key& key : schema.keys())
    std::visit([&](const auto& value) { out[key.table][key.name] = value; }, key.load());
  return out;
}

std::string reference_markdown(const Schema& schema, const Schema* base) {
  std::string out;
  std::vector<std::string> same;
  for (const Table& table : schema.tables()) {
    const std::string keys = keys_markdown(schema, table);
    if (base != nullptr && base->has_table(table.name) && keys_markdown(*base, table) == keys)
      same.push_back(fmt::format("`[{}]`", table.name));
    else
      out += fmt::format("{}## `[{}]`\n\n{}{}", out.empty() ? "" : "\n", table.name,
                         table.help.empty() ? "" : table.help + "\n\n", keys);
  }
  return same.empty() ? out : fmt::format("The tables {} are those above.\n\n{}", fmt::join(same, ", "), out);
}

}  // namespace weft::input
