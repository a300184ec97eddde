// SPDX-License-Identifier: Apache-2.0
//
// What an input file may say, as a list of keys. This room knows no key of Weft: each owner of settings adds his own.
//
//   input::Schema schema;
//   schema.table("optimizer", "Adam, its schedule and its storage.");
//   schema.add("optimizer.learning_rate", settings.learning_rate, "largest learning rate").more_than(0).changeable();
//   schema.add("optimizer.schedule", settings.schedule, {{"constant", Schedule::constant}, …}, "how the rate falls");
//   schema.rule({"optimizer.warmup_steps", "run.steps"}, [&] { return steps < warmup ? "… (why) suggestion" : ""; });
//
// Invariants. A path is "table.key". The value that a member has when its key is added is the key's default. A schema
// refers to the members it was given: they must outlive it. Reading writes only to those members.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace weft::input {

/// What a key can hold. Named values (enums) are texts with `choices`.
using Value = std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>>;

/// What a resumed run does when the key differs from the interrupted one's: refuse, go on, or go on when told to.
enum class Resume { fixed, free, changeable };

struct Bound {
  double value;
  bool excluded;
};

/// One key. Made by Schema::add; the functions below complete it and can be chained.
struct Key {
  std::string table, name, help, unit;
  std::optional<Bound> minimum, maximum;
  std::vector<std::string> choices;  ///< empty: any text
  Value initial;                     ///< the default; its alternative is the key's type
  std::string example;               ///< TOML value for the template of a required key
  bool must_be_given = false;
  bool is_path = false;
  Resume resume = Resume::fixed;
  std::function<void(const Value&)> store;  ///< into the member; the value has passed every check
  std::function<Value()> load;              ///< the member's present value

  std::string path() const { return table + "." + name; }

  Key& in(std::string unit_of_value);
  Key& at_least(double bound);
  Key& at_most(double bound);
  Key& more_than(double bound);
  Key& less_than(double bound);
  Key& one_of(std::vector<std::string> names);
  /// A path: ${NAME} is replaced by the environment variable, $${ stands for ${.
  Key& path_name();
  /// No default: an input without it is an error. `toml_example` stands in the template.
  Key& required(std::string toml_example);
  Key& free();
  Key& changeable();
};

struct Table {
  std::string name, help;
};

/// A condition on several keys. `problem` returns "" or "problem (why) suggestion".
struct Rule {
  std::vector<std::string> paths;  ///< the message points at the first of them that was given
  std::function<std::string()> problem;
};

class Schema {
 public:
  Schema() = default;
  Schema(const Schema&) = delete;  // a copy would write to the same members
  Schema(Schema&&) = default;
  Schema& operator=(Schema&&) = default;

  /// Names a table and what it is for. Tables are printed in the order of their first mention.
  void table(std::string_view name, std::string_view help);

  Key& add(std::string_view path, bool& member, std::string_view help);
  Key& add(std::string_view path, int& member, std::string_view help);
  Key& add(std::string_view path, std::int64_t& member, std::string_view help);
  Key& add(std::string_view path, double& member, std::string_view help);
  Key& add(std::string_view path, std::string& member, std::string_view help);
  Key& add(std::string_view path, std::vector<std::string>& member, std::string_view help);
  /// An enum with the names that an input uses. Every enumerator must be named.
  template <class Enum>
  requires std::is_enum_v<Enum> Key& add(std::string_view path, Enum& member,
                                         std::vector<std::pair<std::string, std::type_identity_t<Enum>>> names,
                                         std::string_view help);

  /// Conditions are checked after reading, when none of their keys had a problem of its own.
  void rule(std::vector<std::string> paths, std::function<std::string()> problem);

  const std::vector<Table>& tables() const { return tables_; }
  const std::deque<Key>& keys() const { return keys_; }
  const std::vector<Rule>& rules() const { return rules_; }
  bool has_table(std::string_view table) const;
  const Key* find(std::string_view path) const;
  /// For commands that need more, or less, than the owner of a key asks for. The path must exist.
  Key& at(std::string_view path);

 private:
  Key& append(std::string_view path, Value initial, std::string_view help);

  std::vector<Table> tables_;
  std::deque<Key> keys_;  // a deque: references from `add` stay valid
  std::vector<Rule> rules_;
};

template <class Enum>
requires std::is_enum_v<Enum> Key& Schema::add(std::string_view path, Enum& member,
                                               std::vector<std::pair<std::string, std::type_identity_t<Enum>>> names,
                                               std::string_view help) {
  const auto name_of = [names](Enum value) {
    for (const auto& [name, named] : names)
      if (named == value) return name;
    return std::string();
  };
  Key& key = append(path, name_of(member), help);
  for (const auto& entry : names) key.choices.push_back(entry.first);
  key.store = [&member, names](const Value& value) {
    for (const auto& [name, named] : names)
      if (name == std::get<std::string>(value)) member = named;
  };
  key.load = [&member, name_of] { return Value(name_of(member)); };
  return key;
}

}  // namespace weft::input
