// SPDX-License-Identifier: Apache-2.0
#include "input/read.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "base/file.hpp"
#include "input/convert.hpp"
#include "input/print.hpp"
#include "input/strings.hpp"

namespace weft::input {
namespace {

constexpr std::size_t kMostProblems = 100;  // further ones are only counted
constexpr int kMostDots = 1000;             // see `too_deep`

struct Position {
  std::size_t line = 1, column = 1;
};

Position position_of(const toml::source_region& source) {
  return {std::max<std::size_t>(source.begin.line, 1), std::max<std::size_t>(source.begin.column, 1)};
}

/// All problems, ordered as they will be reported: by position in the file, then those of overrides.
class Problems {
 public:
  explicit Problems(std::string file_name) : file_name_(std::move(file_name)) {}

  void in_file(Position at, std::string text) {
    add(at.line, at.column, fmt::format("{}:{}:{}: {}", file_name_, at.line, at.column, text));
  }
  void in_override(const std::string& origin, std::size_t index, std::string text) {
    add(SIZE_MAX, index, fmt::format("{}: {}", origin, text));
  }
  void throw_if_any() const {
    if (found_.empty()) return;
    // Several problems follow a line with their number, so that each line begins with its position.
    std::string text = count_ > 1 ? fmt::format("{} problems in the input", count_) : "";
    for (const auto& [place, line] : found_) text += fmt::format("{}{}", text.empty() ? "" : "\n", line);
    if (count_ > found_.size()) text += fmt::format("\n… and {} more problems", count_ - found_.size());
    throw Error(ExitCode::usage, text, KnownTo::all_ranks);
  }

 private:
  void add(std::size_t line, std::size_t column, std::string text) {
    if (++count_ <= kMostProblems) found_.insert({{line, column}, std::move(text)});
  }

  std::string file_name_;
  std::multimap<std::pair<std::size_t, std::size_t>, std::string> found_;
  std::size_t count_ = 0;
};

/// True if dotted names could nest too deeply. Dotted names and nested values deepen the parsed tree, and the parser
/// limits only the latter. The tree is destroyed recursively: a megabyte of "a.a.a.a" would overflow the stack. The
/// number of dots outside strings and comments bounds the depth. Strings are recognised as in the parser, which stops
/// with an error before any place where the two could differ.
bool too_deep(std::string_view text) {
  int dots = 0;
  std::size_t i = 0;
  const auto at = [&](std::string_view what) { return text.substr(i, what.size()) == what; };
  while (i < text.size()) {
    const char c = text[i];
    if (c == '#') {
      while (i < text.size() && text[i] != '\n') ++i;
    } else if (c == '"' || c == '\'') {
      const bool long_text = at("\"\"\"") || at("'''");
      const std::string end(long_text ? 3 : 1, c);
      i += end.size();
      while (i < text.size() && !at(end) && (long_text || text[i] != '\n')) i += c == '"' && text[i] == '\\' ? 2 : 1;
      i += end.size();
      for (int extra = 0; long_text && extra < 2 && i < text.size() && text[i] == c; ++extra)
        ++i;  // """a"""" holds a and a quotation mark
    } else {
      dots += c == '.';
      ++i;
    }
  }
  return dots > kMostDots;
}

struct SyntaxError {
  Position at;
  std::string text;
};

/// Throws SyntaxError and nothing else.
toml::table parse(std::string_view text, std::string_view name) {
  if (text.size() > static_cast<std::size_t>(kLargestInput))
    throw SyntaxError{{}, fmt::format("the input has {} bytes (at most {} are accepted)", text.size(), kLargestInput)};
  if (too_deep(text))
    throw SyntaxError{
        {},
        fmt::format("more than {} dots outside strings and comments (names are nested too deeply); was another file "
                    "meant?",
                    kMostDots)};
  try {
    return toml::parse(text, name);
  } catch (const toml::parse_error& failure) {
    Position at = position_of(failure.source());
    std::string why;
    const std::string_view description = failure.description();
    if (description.find("cannot redefine") != std::string_view::npos) {
      // The parser gives the position of the value. Report that of the name, which begins the line.
      std::size_t begin = 0;
      for (std::size_t line = 1; line < at.line; ++line) begin = text.find('\n', begin) + 1;
      const std::size_t first = text.find_first_not_of(" \t", begin);
      at.column = first == std::string_view::npos ? 1 : first - begin + 1;
      const std::string_view what = text.substr(first == std::string_view::npos ? begin : first);
      const std::string_view name_text = trim(what.substr(0, what.find_first_of("=\r\n#")));
      throw SyntaxError{at, fmt::format("{} is defined twice (each key and table must be unique); remove one",
                                        input::quoted(name_text))};
    }
    const std::size_t colon = description.find(": ");
    why = input::quoted(colon == std::string_view::npos ? description : description.substr(colon + 2), 200);
    why = why.substr(1, why.size() - 2);
    std::string suggestion;
    if (description.find("could not determine value type") != std::string_view::npos)
      suggestion = "; write strings in \"quotation marks\"";
    if (description.find("string: unescaped control characters") != std::string_view::npos)
      suggestion = "; close the string on the same line with the same quotation mark";
    throw SyntaxError{at, fmt::format("not TOML ({}){}; the rest of the file was not read", why, suggestion)};
  } catch (const std::exception& failure) {
    throw SyntaxError{{}, fmt::format("not TOML ({})", failure.what())};
  }
}

std::vector<std::string> names_of(const Schema& schema, std::string_view table) {
  std::vector<std::string> names;
  for (const Key& key : schema.keys())
    if (key.table == table) names.push_back(key.name);
  return names;
}

std::string unknown_table(const Schema& schema, std::string_view name) {
  std::vector<std::string> tables;
  for (const Table& table : schema.tables()) tables.push_back(table.name);
  std::string hint = nearest(name, tables);
  hint = hint.empty() ? fmt::format(" (valid: [{}])", fmt::join(tables, "], ["))
                      : fmt::format("; did you mean [{}]?", hint);
  const std::string shown = input::quoted(name);
  return fmt::format("unknown table [{}]{}", std::string_view(shown).substr(1, shown.size() - 2), hint);
}

/// States what became of a key of earlier versions, or suggests the nearest key of this table, or else of all tables.
std::string unknown_key(const Schema& schema, std::string_view table, std::string_view name) {
  const std::string path = fmt::format("{}.{}", table, name);
  if (const Key* key = schema.find_former(path))
    return fmt::format("unknown key {} in [{}]; it is \"{}\" in [{}] now", input::quoted(name), table, key->name,
                       key->table);
  if (const std::string* advice = schema.advice_for(path))
    return fmt::format("unknown key {} in [{}] (of an earlier version); {}", input::quoted(name), table, *advice);
  const std::vector<std::string> own = names_of(schema, table);
  std::string hint = nearest(name, own);
  if (!hint.empty())
    return fmt::format("unknown key {} in [{}]; did you mean \"{}\"?", input::quoted(name), table, hint);
  std::vector<std::string> all;
  for (const Key& key : schema.keys()) all.push_back(key.name);
  hint = nearest(name, all);
  for (const Key& key : schema.keys())
    if (key.name == hint)
      return fmt::format("unknown key {} in [{}]; did you mean \"{}\" in [{}]?", input::quoted(name), table, hint,
                         key.table);
  return fmt::format("unknown key {} in [{}] (valid: {})", input::quoted(name), table, fmt::join(own, ", "));
}

bool has_retired_value(const Key& key, const toml::node& node) {
  const toml::value<std::string>* const text = node.as_string();
  return text != nullptr && std::any_of(key.retired_values.begin(), key.retired_values.end(),
                                        [&](const auto& retired) { return retired.first == text->get(); });
}

/// Origin of the value of a key, for messages of rules.
struct Origin {
  Position at;
  std::size_t override_index = 0;  ///< 1, 2, …; 0: the file
};

std::string shown_origin(const Override& given) {
  if (!given.origin.empty()) return given.origin;
  const std::string shown = input::quoted(given.assignment);
  return "--set " + shown.substr(1, shown.size() - 2);
}

toml::table parse_resolved(std::string_view text, const std::string& name);
const toml::node* node_of(const toml::table& tree, const Key& key);

/// Collects the values of file and overrides, and stores them if there are no problems.
class Reader {
 public:
  Reader(const Schema& schema, const std::string& file_name, Writer writer)
      : schema_(schema), problems_(file_name), writer_(writer) {}

  void file(std::string_view text, const std::string& file_name) {
    try {
      tree_ = parse(text, file_name);
    } catch (const SyntaxError& failure) {
      problems_.in_file(failure.at, failure.text);
      complete_ = false;
      return;
    }
    for (auto&& [name, node] : tree_) {
      const Position at = position_of(name.source());
      if (!schema_.has_table(name.str())) {
        if (node.is_table())
          problems_.in_file(at, unknown_table(schema_, name.str()));
        else
          problems_.in_file(at, outside(name.str()));
      } else if (const toml::table* table = node.as_table()) {
        tables_[std::string(name.str())] = at;
        this->table(std::string(name.str()), *table);
      } else {
        problems_.in_file(at, fmt::format("[{}] must be a table, not {}; write [{}] and its keys below", name.str(),
                                          what_is(node), name.str()));
        failed_tables_.insert(std::string(name.str()));
      }
    }
  }

  void override_with(const Override& given, std::size_t index) {
    const auto problem = [&](std::string text) { problems_.in_override(shown_origin(given), index, std::move(text)); };
    const std::size_t equals = given.assignment.find('=');
    if (equals == std::string::npos) return problem("has no \"=\" (the syntax is table.key=value)");
    const std::string_view path = trim(std::string_view(given.assignment).substr(0, equals));
    const std::string_view raw = trim(std::string_view(given.assignment).substr(equals + 1));
    const Key* key = schema_.find(path);
    if (key == nullptr) {
      const std::size_t dot = path.find('.');
      if (dot == std::string_view::npos) return problem(outside(path));
      const std::string_view table = path.substr(0, dot);
      return problem(schema_.has_table(table) ? unknown_key(schema_, table, path.substr(dot + 1))
                                              : unknown_table(schema_, table));
    }
    std::string text;
    const Value value = override_value(*key, raw, text);
    if (!text.empty()) {
      failed_.insert(key->path());
      return problem(text);
    }
    set(*key, value, {{}, index});
  }

  void finish(const std::vector<Override>& overrides) {
    if (complete_)
      for (const Key& key : schema_.keys())
        if (key.must_be_given && !is_given(key) && !failed_.count(key.path()) && !failed_tables_.count(key.table)) {
          const auto table = tables_.find(key.table);
          problems_.in_file(table == tables_.end() ? Position{} : table->second,
                            fmt::format("{} is missing ({}; it has no default); add {} = {} to [{}]{}", key.path(),
                                        key.help, key.name, key.example, key.table,
                                        key.alternative.empty() ? "" : ", or give " + key.alternative));
          failed_.insert(key.path());
        }
    if (!complete_) problems_.throw_if_any();  // rules need the values of the file
    for (const Key& key : schema_.keys()) {
      const auto value = values_.find(key.path());
      key.store(value == values_.end() ? key.initial : value->second);
    }
    const toml::table otherwise = parse_resolved(schema_.otherwise(), "values that the input does not give");
    for (const Key& key : schema_.keys()) {
      if (values_.count(key.path())) continue;
      std::string problem;
      if (const toml::node* node = node_of(otherwise, key))
        key.store(convert(key, *node, problem));
      else if (key.derive)
        key.store(key.derive());
    }
    for (const Key& key : schema_.keys())
      for (const Condition& condition : key.conditions)
        check({{key.path(), condition.path}, [&] { return schema_.problem(key, condition); }}, overrides);
    for (const Rule& rule : schema_.rules()) check(rule, overrides);
    problems_.throw_if_any();
  }

  const std::map<std::string, Value>& values() const { return values_; }

 private:
  void table(const std::string& table_name, const toml::table& table) {
    for (auto&& [name, node] : table) {
      const std::string path = table_name + "." + std::string(name.str());
      const Key* key = schema_.find(path);
      if (key == nullptr && writer_ == Writer::checkpoint) {
        key = schema_.find_former(path);
        if (key == nullptr && schema_.advice_for(path) != nullptr) continue;
      }
      if (key == nullptr) {
        problems_.in_file(position_of(name.source()), unknown_key(schema_, table_name, name.str()));
        continue;
      }
      if (writer_ == Writer::checkpoint && key->resume != Resume::fixed && has_retired_value(*key, node)) continue;
      std::string problem;
      const Value value = convert(*key, node, problem);
      if (problem.empty()) {
        set(*key, value, {position_of(name.source()), 0});
      } else {
        problems_.in_file(position_of(node.source()), problem);
        failed_.insert(key->path());
      }
    }
  }

  /// The message for a key outside all tables.
  std::string outside(std::string_view name) const {
    std::vector<std::string> all;
    for (const Key& key : schema_.keys()) all.push_back(key.name);
    const std::string hint = nearest(name, all);
    for (const Key& key : schema_.keys())
      if (key.name == hint)
        return fmt::format("unknown key {} (every key belongs to a table); did you mean {}?", input::quoted(name),
                           key.path());
    return fmt::format("unknown key {} (every key belongs to a table)", input::quoted(name));
  }

  Value override_value(const Key& key, std::string_view raw, std::string& problem) const {
    const bool wants_text = std::holds_alternative<std::string>(key.initial);
    const auto bare = [&] {
      const toml::value<std::string> word{std::string(raw)};
      return convert(key, word, problem);
    };
    try {
      const std::string line = "value = " + std::string(raw);
      const toml::table parsed = parse(line, "override");
      const toml::node* node = parsed.get("value");
      if (parsed.size() == 1 && node != nullptr &&
          !(wants_text && !node->is_string() && raw[0] != '[' && raw[0] != '{'))
        return convert(key, *node, problem);
    } catch (const SyntaxError& failure) {
      if (raw.size() > static_cast<std::size_t>(kLongestText) ||
          (!raw.empty() && std::string_view("\"'[{").find(raw[0]) != std::string_view::npos)) {
        problem = failure.text;
        return key.initial;
      }
    }
    return bare();
  }

  void set(const Key& key, Value value, Origin origin) {
    values_[key.path()] = std::move(value);
    origins_[key.path()] = origin;
  }

  /// A required key, or the one that may be given in its place: a text that is not empty.
  bool is_given(const Key& key) const {
    if (key.alternative.empty()) return values_.count(key.path()) > 0;
    const auto has_text = [&](const std::string& path) {
      const auto value = values_.find(path);
      return value != values_.end() && !std::get<std::string>(value->second).empty();
    };
    return has_text(key.path()) || has_text(key.alternative);
  }

  void check(const Rule& rule, const std::vector<Override>& overrides) {
    const Origin* origin = nullptr;
    for (const std::string& path : rule.paths) {
      if (failed_.count(path)) return;
      const auto given = origins_.find(path);
      if (given == origins_.end()) continue;
      // An override is named rather than the file, which was written before it.
      if (origin == nullptr || (origin->override_index == 0 && given->second.override_index > 0))
        origin = &given->second;
    }
    const std::string text = rule.problem();
    if (text.empty()) return;
    if (origin != nullptr && origin->override_index > 0)
      problems_.in_override(shown_origin(overrides[origin->override_index - 1]), origin->override_index, text);
    else
      problems_.in_file(origin == nullptr ? Position{} : origin->at, text);
  }

  const Schema& schema_;
  Problems problems_;
  const Writer writer_;
  toml::table tree_;
  bool complete_ = true;  // the file is TOML
  std::map<std::string, Value> values_;
  std::map<std::string, Origin> origins_;
  std::map<std::string, Position> tables_;
  std::set<std::string> failed_, failed_tables_;
};

}  // namespace

bool has_table(std::string_view text, std::string_view table) {
  try {
    return parse(text, "").get_as<toml::table>(table) != nullptr;
  } catch (const SyntaxError&) {
    return false;
  }
}

std::string load_text(const std::string& path) {
  std::string text(static_cast<std::size_t>(kLargestInput) + 1, '\0');
  try {
    const Descriptor file = open_regular(path, ExitCode::usage);
    std::size_t filled = 0;
    for (ssize_t got = 1; got > 0 && filled < text.size(); filled += static_cast<std::size_t>(got)) {
      got = ::read(file, text.data() + filled, text.size() - filled);
      if (got < 0) throw error(ExitCode::usage, "{}: cannot be read ({})", path, std::strerror(errno));
    }
    text.resize(filled);
  } catch (const Error& failure) {
    throw error(ExitCode::usage, "{}; give the path of an input file", failure.what());
  }
  if (text.size() > static_cast<std::size_t>(kLargestInput))
    throw error(ExitCode::usage, "{}: is larger than {} bytes (too large for an input file); is the path correct?",
                path, kLargestInput);
  return text;
}

Override override_text(std::string_view path, std::string_view text, std::string_view origin) {
  return {fmt::format("{}={}", path, toml_value(std::string(text))), std::string(origin)};
}

void read(const Schema& schema, std::string_view text, const std::string& file_name,
          const std::vector<Override>& overrides, Writer writer) {
  Reader reader(schema, file_name, writer);
  reader.file(text, file_name);
  for (std::size_t i = 0; i < overrides.size(); ++i) reader.override_with(overrides[i], i + 1);
  reader.finish(overrides);
}

namespace {

toml::table parse_resolved(std::string_view text, const std::string& name) {
  try {
    return parse(text, name);
  } catch (const SyntaxError& failure) {
    throw error(ExitCode::usage, "{}:{}:{}: {}", name, failure.at.line, failure.at.column, failure.text);
  }
}

/// nullptr if the tree has no such key, by its present or former name.
const toml::node* node_of(const toml::table& tree, const Key& key) {
  const auto at = [&](const std::string& table, const std::string& name) {
    const toml::table* keys = tree[table].as_table();
    return keys == nullptr ? nullptr : keys->get(name);
  };
  const toml::node* node = at(key.table, key.name);
  if (node != nullptr || key.former.empty()) return node;
  const std::size_t dot = key.former.find('.');
  return at(key.former.substr(0, dot), key.former.substr(dot + 1));
}

}  // namespace

void require_current(const Schema& schema, std::string_view old_text, const std::string& old_name) {
  const toml::table old = parse_resolved(old_text, old_name);
  for (const Key& key : schema.keys()) {
    const toml::node* node = node_of(old, key);
    if (key.resume != Resume::fixed || node == nullptr || !has_retired_value(key, *node)) continue;
    std::string problem;
    convert(key, *node, problem);
    throw collective_error(ExitCode::usage, "{}: {}", old_name, problem);
  }
}

std::vector<Change> changed_keys(const Schema& schema, std::string_view old_text, const std::string& old_name) {
  require_current(schema, old_text, old_name);
  const toml::table old = parse_resolved(old_text, old_name);
  std::vector<Change> changes;
  for (const Key& key : schema.keys()) {
    if (key.resume == Resume::free) continue;
    const toml::node* node = node_of(old, key);
    std::string problem;
    const Value before = node == nullptr ? key.initial : convert(key, *node, problem);
    // A value that this version does not accept counts as a change.
    if (!problem.empty() || before != key.load())
      changes.push_back(
          {key.path(), problem.empty() ? toml_value(before) : what_is(*node), toml_value(key.load()), key.resume});
  }
  return changes;
}

Value value_in(const Schema& schema, std::string_view path, std::string_view old_text, const std::string& old_name) {
  const Key& key = *schema.find(path);
  const toml::table old = parse_resolved(old_text, old_name);
  const toml::node* node = node_of(old, key);
  std::string problem;
  const Value value = node == nullptr ? key.initial : convert(key, *node, problem);
  return problem.empty() ? value : key.initial;
}

}  // namespace weft::input
