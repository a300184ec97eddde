// SPDX-License-Identifier: Apache-2.0
//
// A schema as text: what a run was given, a template to start from, a reference for the documentation.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "input/schema.hpp"

namespace weft::input {

/// The value as TOML. Doubles are the shortest text that reads back to the same bits.
std::string toml_value(const Value& value);

/// Every key with its present value: an input that reads back to exactly these values.
std::string print(const Schema& schema);

/// A commented template: every key with its help, unit, range and default.
std::string defaults(const Schema& schema);

/// Present values by table and key, for run.json.
nlohmann::ordered_json to_json(const Schema& schema);

/// One table of keys for each table of the input, in Markdown.
std::string reference_markdown(const Schema& schema);

/// "integer", "number", "text", …
std::string type_name(const Key& key);
/// "at least 1", "more than 0 and less than 1", "" when any value will do.
std::string range_text(const Key& key);

}  // namespace weft::input
