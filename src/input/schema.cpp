// SPDX-License-Identifier: Apache-2.0
#include "input/schema.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "base/contract.hpp"

namespace weft::input {

Key& Key::in(std::string unit_of_value) {
  unit = std::move(unit_of_value);
  return *this;
}
Key& Key::at_least(double bound) {
  minimum = {bound, false};
  return *this;
}
Key& Key::at_most(double bound) {
  maximum = {bound, false};
  return *this;
}
Key& Key::more_than(double bound) {
  minimum = {bound, true};
  return *this;
}
Key& Key::less_than(double bound) {
  maximum = {bound, true};
  return *this;
}
Key& Key::one_of(std::vector<std::string> names) {
  choices = std::move(names);
  return *this;
}
Key& Key::or_word(std::string word, std::int64_t value) {
  choices = {word};
  store = [store = store, value](const Value& given) {
    store(std::holds_alternative<std::string>(given) ? Value(value) : given);
  };
  load = [load = load, word, value] { return load() == Value(value) ? Value(word) : load(); };
  return *this;
}
Key& Key::path_name() {
  is_path = true;
  return *this;
}
Key& Key::required(std::string toml_example, std::string in_place) {
  must_be_given = true;
  alternative = std::move(in_place);
  example = std::move(toml_example);
  return *this;
}
Key& Key::derived(std::string how, std::function<Value()> value) {
  derivation = std::move(how);
  derive = std::move(value);
  return *this;
}
Key& Key::only_with(std::string other, std::vector<std::string> values, std::string why) {
  conditions.push_back({Condition::Kind::only_with, std::move(other), std::move(values), std::move(why), derive});
  return *this;
}
Key& Key::not_with(std::string other, std::vector<std::string> values, std::string why) {
  conditions.push_back({Condition::Kind::not_with, std::move(other), std::move(values), std::move(why), derive});
  return *this;
}
Key& Key::required_with(std::string other, std::vector<std::string> values, std::string why) {
  conditions.push_back({Condition::Kind::required_with, std::move(other), std::move(values), std::move(why), derive});
  return *this;
}
Key& Key::free() {
  resume = Resume::free;
  return *this;
}
Key& Key::changeable() {
  resume = Resume::changeable;
  return *this;
}

Key& Key::retired_value(std::string value, std::string advice) {
  retired_values.emplace_back(std::move(value), std::move(advice));
  return *this;
}

Key& Key::formerly(std::string path) {
  former = std::move(path);
  return *this;
}

void Schema::retired(std::string_view path, std::string_view advice) { retired_.emplace_back(path, advice); }

std::string text_of(const Condition& condition) {
  if (condition.values.empty()) return condition.path;
  return fmt::format("{} = \"{}\"", condition.path, fmt::join(condition.values, "\" or \""));
}

void Schema::table(std::string_view name, std::string_view help) {
  for (Table& table : tables_)
    if (table.name == name) {
      table.help = help;
      return;
    }
  tables_.push_back({std::string(name), std::string(help)});
}

bool Schema::has_table(std::string_view table) const {
  return std::any_of(tables_.begin(), tables_.end(), [&](const Table& known) { return known.name == table; });
}

const Key* Schema::find(std::string_view path) const {
  for (const Key& key : keys_)
    if (key.path() == path) return &key;
  return nullptr;
}

const Key* Schema::find_former(std::string_view path) const {
  for (const Key& key : keys_)
    if (key.former == path) return &key;
  return nullptr;
}

const std::string* Schema::advice_for(std::string_view path) const {
  for (const auto& [known, advice] : retired_)
    if (known == path) return &advice;
  return nullptr;
}

Key& Schema::at(std::string_view path) {
  const Key* key = find(path);
  if (key == nullptr) contract_broken(std::string(path).c_str(), __FILE__, __LINE__);
  return const_cast<Key&>(*key);
}

std::string Schema::problem(const Key& key, const Condition& condition) const {
  const Key* const other = find(condition.path);
  WEFT_ASSERT(other != nullptr);
  const Value value = key.load(), its_value = other->load();
  const bool given = value != key.initial && !(condition.usual && value == condition.usual());
  const bool holds = condition.values.empty() ? its_value != other->initial
                                              : std::count(condition.values.begin(), condition.values.end(),
                                                           std::get<std::string>(its_value)) > 0;
  const std::string asked = text_of(condition), why = condition.why.empty() ? "" : fmt::format(" ({})", condition.why);
  switch (condition.kind) {
    case Condition::Kind::not_with:
      if (!given || !holds) return {};
      return fmt::format("{} does not go with {}{}; leave one of them out", key.path(), asked, why);
    case Condition::Kind::required_with:
      if (!given && holds) return fmt::format("{} needs {} ({}); give it", asked, key.path(), key.help);
      [[fallthrough]];
    case Condition::Kind::only_with:
      if (!given || holds) return {};
      return condition.values.empty() ? fmt::format("{} has no effect without {}{}; give {}, or leave {} out",
                                                    key.path(), asked, why, other->name, key.name)
                                      : fmt::format("{} is for {} only{}; leave it out", key.path(), asked, why);
  }
  return {};
}

std::string Schema::problem_of(std::string_view path) const {
  for (const Key& key : keys_)
    for (const Condition& condition : key.conditions)
      if (key.path() == path || condition.path == path)
        if (std::string found = problem(key, condition); !found.empty()) return found;
  for (const Rule& rule : rules_)
    if (std::find(rule.paths.begin(), rule.paths.end(), path) != rule.paths.end())
      if (std::string found = rule.problem(); !found.empty()) return found;
  return {};
}

Key& Schema::append(std::string_view path, Value initial, std::string_view help) {
  const std::size_t dot = path.find('.');
  WEFT_ASSERT(dot != std::string_view::npos && find(path) == nullptr);
  Key key;
  key.table = path.substr(0, dot);
  key.name = path.substr(dot + 1);
  key.help = help;
  key.initial = std::move(initial);
  if (!has_table(key.table)) table(key.table, "");
  keys_.push_back(std::move(key));
  return keys_.back();
}

namespace {

template <class T>
Key& bind(Key& key, T& member) {
  key.store = [&member](const Value& value) { member = std::get<T>(value); };
  key.load = [&member] { return Value(member); };
  return key;
}

}  // namespace

Key& Schema::add(std::string_view path, bool& member, std::string_view help) {
  return bind(append(path, member, help), member);
}
Key& Schema::add(std::string_view path, std::int64_t& member, std::string_view help) {
  return bind(append(path, member, help), member);
}
Key& Schema::add(std::string_view path, double& member, std::string_view help) {
  return bind(append(path, member, help), member);
}
Key& Schema::add(std::string_view path, std::string& member, std::string_view help) {
  return bind(append(path, member, help), member);
}
Key& Schema::add(std::string_view path, std::vector<std::string>& member, std::string_view help) {
  return bind(append(path, member, help), member);
}

Key& Schema::add(std::string_view path, std::vector<double>& member, std::string_view help) {
  return bind(append(path, member, help), member);
}
Key& Schema::add(std::string_view path, int& member, std::string_view help) {
  Key& key = append(path, static_cast<std::int64_t>(member), help);
  key.store = [&member](const Value& value) { member = static_cast<int>(std::get<std::int64_t>(value)); };
  key.load = [&member] { return Value(static_cast<std::int64_t>(member)); };
  return key.at_least(std::numeric_limits<int>::min()).at_most(std::numeric_limits<int>::max());
}

void Schema::rule(std::vector<std::string> paths, std::function<std::string()> problem) {
  rules_.push_back({std::move(paths), std::move(problem)});
}

}  // namespace weft::input
