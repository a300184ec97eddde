// SPDX-License-Identifier: Apache-2.0
#include "input/schema.hpp"

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
