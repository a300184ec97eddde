// SPDX-License-Identifier: Apache-2.0
//
// JSON. Parsing and writing are compiled in one file only: they are most of the library's compile time.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

extern template class nlohmann::basic_json<>;
extern template class nlohmann::basic_json<nlohmann::ordered_map>;

namespace weft {

/// Keys in the order of insertion: what Weft writes.
using Json = nlohmann::ordered_json;
/// Keys in alphabetical order: what is compared or has a digest, and large files of other programs (finding a key in a
/// Json takes time proportional to their number).
using SortedJson = nlohmann::json;

/// Levels of lists and objects that are read: functions that recur over a deeper text would overflow the stack.
inline constexpr int kDeepestJson = 64;
/// Levels of lists and objects in a text.
int nesting_of(std::string_view text);

/// is_discarded() if the text is not JSON or deeper than kDeepestJson.
template <class AnyJson = Json>
AnyJson parse_json(std::string_view text);

/// Where a text stops being JSON.
struct JsonFault {
  std::size_t byte = 0;  ///< from 1
  std::string why;
};
/// parse_json of a text that the user wrote; fills `fault` where the result is_discarded().
SortedJson parse_json(std::string_view text, JsonFault& fault);

/// One line, or indented by `indent` >= 0. Invalid UTF-8 is replaced.
template <class AnyJson>
std::string json_text(const AnyJson& value, int indent = -1);

/// The value with each non-finite number as "nan", "inf" or "-inf": JSON has none, and null would hide the cause.
Json with_finite_numbers(Json value);
/// json_text of with_finite_numbers(value).
std::string finite_json_text(const Json& value, int indent = -1);

extern template Json parse_json(std::string_view);
extern template SortedJson parse_json(std::string_view);
extern template std::string json_text(const Json&, int);
extern template std::string json_text(const SortedJson&, int);

}  // namespace weft
