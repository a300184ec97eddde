// SPDX-License-Identifier: Apache-2.0
//
// Prints a schema: the input of a run, a template, and the reference of the documentation.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "input/schema.hpp"

namespace weft::input {

/// The value as TOML. Doubles are printed with the fewest digits that reproduce the same bits.
std::string toml_value(const Value& value);

/// Every key with its current value: an input that gives exactly these values when read.
std::string print(const Schema& schema);

/// A commented template: every key with its help, unit, range and default.
std::string defaults(const Schema& schema);

/// Current values by table and key, for run.json.
nlohmann::ordered_json to_json(const Schema& schema);

/// One table of keys for each table of the input, in Markdown. Tables that are the same in `base` are named only.
std::string reference_markdown(const Schema& schema, const Schema* base = nullptr);

/// "integer", "number", "string", …
std::string type_name(const Key& key);
/// "at least 1", "more than 0, less than 1", "" if all values are allowed.
std::string range_text(const Key& key);

}  // namespace weft::input
