// SPDX-License-Identifier: Apache-2.0
//
// Schema of an input file: a list of keys. This module defines no key of Weft; each module adds the keys of its
// settings.
//
// clang-format off
//   input::Schema schema;
//   schema.table("optimizer", "Adam, its schedule and its storage.");
//   schema.add("optimizer.learning_rate", settings.learning_rate, "largest learning rate").more_than(0).changeable();
//   schema.add("optimizer.tuning_patience", settings.patience, "…").only_with("optimizer.tuning");
//   schema.add("optimizer.schedule", settings.schedule, {{"constant", Schedule::constant}, …}, "decay of the rate");
//   schema.rule({"optimizer.warmup_steps", "run.steps"}, [&] { return steps < warmup ? "… (why) suggestion" : ""; });
// clang-format on
//
// Invariants. A path is "table.key". The default of a key is the value of its member when the key is added. A schema
// refers to these members, which must outlive it. Reading an input writes only to them.
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

/// Upper bound of any number of steps in an input.
inline constexpr double kMostSteps = 1e12;

/// Value of a key. Enums are strings with `choices`.
using Value = std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>, std::vector<double>>;

/// Whether a resumed run may change a key.
enum class Resume {
  fixed,      ///< never
  free,       ///< always
  changeable  ///< with resume.accept_changed
};

struct Bound {
  double value;
  bool excluded;
};

/// How a key depends on another one. Check, message and documentation of both follow from it. A key counts as given if
/// its value is not the default, so that a printed input, which has every key, can be read again.
struct Condition {
  enum class Kind { only_with, not_with, required_with };
  Kind kind;
  std::string path;                 ///< the other key
  std::vector<std::string> values;  ///< names of its values; empty: all but its default
  std::string why;                  ///< "" or the reason
  std::function<Value()> usual;     ///< what the key derives without this condition; empty: nothing
};

/// One key. Created by Schema::add; the member functions can be chained.
struct Key {
  std::string table, name, help, unit;
  std::optional<Bound> minimum, maximum;
  std::vector<std::string> choices;  ///< empty: any string; of an integer: words that may replace it
  Value initial;                     ///< the default; its alternative is the key's type
  std::string example;               ///< TOML value for the template of a required key
  bool must_be_given = false;
  std::string alternative;  ///< path of the key that may be given in place of a required one
  bool is_path = false;
  Resume resume = Resume::fixed;
  std::function<Value()> derive;  ///< the value of a key that the input does not give; empty: `initial`
  std::string former;             ///< path in earlier versions; "": the same
  std::vector<std::pair<std::string, std::string>> retired_values;  ///< name, advice
  std::string derivation;  ///< how, for templates and documentation: "of the preset"
  std::vector<Condition> conditions;
  std::function<void(const Value&)> store;  ///< assigns a checked value to the member
  std::function<Value()> load;              ///< current value of the member

  std::string path() const { return table + "." + name; }

  Key& in(std::string unit_of_value);
  Key& at_least(double bound);
  Key& at_most(double bound);
  Key& more_than(double bound);
  Key& less_than(double bound);
  Key& one_of(std::vector<std::string> names);
  /// An integer key that may also be this word, which is stored as `value`.
  Key& or_word(std::string word, std::int64_t value);
  /// A file path: ${NAME} is replaced by the environment variable; $${ gives ${.
  Key& path_name();
  /// No default: a missing key is an error. The template shows `toml_example`. `in_place`: path of a key that may be
  /// given instead.
  Key& required(std::string toml_example, std::string in_place = "");
  /// Where the input does not give the key, its value follows from keys that were added before it.
  Key& derived(std::string how, std::function<Value()> value);
  /// An error unless the key `other` has one of these values (or, without values, another one than its default).
  Key& only_with(std::string other, std::vector<std::string> values = {}, std::string why = "");
  /// An error if the key `other` has one of these values (or, without values, another one than its default).
  Key& not_with(std::string other, std::vector<std::string> values = {}, std::string why = "");
  /// Adds the condition of `only_with`, and one more: it is an error if the key `other` has one of these values and
  /// this one is not given.
  Key& required_with(std::string other, std::vector<std::string> values = {}, std::string why = "");
  Key& free();
  Key& changeable();
  /// The path that earlier versions gave the key: an error that states the new one, except in the input of a
  /// checkpoint.
  Key& formerly(std::string path);
  /// A name that earlier versions accepted: an error with this advice; in the input of a checkpoint the key has its
  /// default instead, unless it is fixed.
  Key& retired_value(std::string name, std::string advice);
};

/// "transcoder.decoder = "tied_target"", "lora.rank": what `condition` requires of the other key.
std::string text_of(const Condition& condition);

struct Table {
  std::string name, help;
};

/// A condition on several keys. `problem` returns "" or "problem (why) suggestion".
struct Rule {
  std::vector<std::string> paths;  ///< messages give the position of the first one that is set
  std::function<std::string()> problem;
};

class Schema {
 public:
  Schema() = default;
  Schema(const Schema&) = delete;  // a copy would write to the same members
  Schema(Schema&&) = default;
  Schema& operator=(Schema&&) = default;

  /// Adds a table with its help text. Tables are printed in the order of their first use.
  void table(std::string_view name, std::string_view help);

  Key& add(std::string_view path, bool& member, std::string_view help);
  Key& add(std::string_view path, int& member, std::string_view help);
  Key& add(std::string_view path, std::int64_t& member, std::string_view help);
  Key& add(std::string_view path, double& member, std::string_view help);
  Key& add(std::string_view path, std::string& member, std::string_view help);
  Key& add(std::string_view path, std::vector<std::string>& member, std::string_view help);
  Key& add(std::string_view path, std::vector<double>& member, std::string_view help);
  /// An enum with its names in an input. Every enumerator must have a name.
  template <class Enum>
  requires std::is_enum_v<Enum> Key& add(std::string_view path, Enum& member,
                                         std::vector<std::pair<std::string, std::type_identity_t<Enum>>> names,
                                         std::string_view help);

  /// A path of earlier versions that has no key any more: an error with this advice, except in the input of a
  /// checkpoint.
  void retired(std::string_view path, std::string_view advice);

  /// Rules are checked after reading, unless one of their keys has an error.
  void rule(std::vector<std::string> paths, std::function<std::string()> problem);

  /// Keys that the input does not give have their values in this text, a resolved input or a part of one, if they are
  /// there. Formed when the members have what the input gives.
  void otherwise(std::function<std::string()> text) { otherwise_ = std::move(text); }
  std::string otherwise() const { return otherwise_ ? otherwise_() : std::string(); }

  const std::vector<Table>& tables() const { return tables_; }
  const std::deque<Key>& keys() const { return keys_; }
  const std::vector<Rule>& rules() const { return rules_; }
  bool has_table(std::string_view table) const;
  const Key* find(std::string_view path) const;
  /// The key that earlier versions had at this path; null if there is none.
  const Key* find_former(std::string_view path) const;
  /// The advice for a retired path; null for any other path.
  const std::string* advice_for(std::string_view path) const;
  /// Why the values of the members do not meet the condition of `key`: "problem (why) suggestion", or "".
  std::string problem(const Key& key, const Condition& condition) const;
  /// The first problem of a condition or a rule between the key at this path and others; "" if there is none.
  std::string problem_of(std::string_view path) const;
  /// The key at this path, which must exist, for commands that change its requirements and for modules that add
  /// conditions to keys of other modules.
  Key& at(std::string_view path);

 private:
  Key& append(std::string_view path, Value initial, std::string_view help);

  std::vector<Table> tables_;
  std::deque<Key> keys_;  // a deque: references from `add` stay valid
  std::vector<Rule> rules_;
  std::function<std::string()> otherwise_;
  std::vector<std::pair<std::string, std::string>> retired_;  // path, advice
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
