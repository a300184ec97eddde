// SPDX-License-Identifier: Apache-2.0
#include "base/json.hpp"

#include <algorithm>
#include <cmath>

template class nlohmann::basic_json<>;
template class nlohmann::basic_json<nlohmann::ordered_map>;

namespace weft {

int nesting_of(std::string_view text) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\')
      ++i;
    else if (c == '"')
      quoted = !quoted;
    else if (!quoted && (c == '{' || c == '['))
      deepest = std::max(deepest, ++depth);
    else if (!quoted && (c == '}' || c == ']'))
      --depth;
  }
  return deepest;
}

template <class AnyJson>
AnyJson parse_json(std::string_view text) {
  if (nesting_of(text) > kDeepestJson) return AnyJson(AnyJson::value_t::discarded);
  return AnyJson::parse(text, nullptr, false);
}

SortedJson parse_json(std::string_view text, JsonFault& fault) {
  if (nesting_of(text) > kDeepestJson) {
    fault = {1, "lists and objects are nested more than " + std::to_string(kDeepestJson) + " levels deep"};
    return SortedJson(SortedJson::value_t::discarded);
  }
  try {
    return SortedJson::parse(text);
  } catch (const SortedJson::parse_error& error) {
    // "[…] parse error at line 1, column 9: syntax error while parsing value - WHY; last read: 'TOKEN'": the token may
    // be as long as the text.
    std::string_view why = error.what();
    why = why.substr(0, why.find("; last read"));
    if (const std::size_t dash = why.find(" - "); dash != why.npos) why.remove_prefix(dash + 3);
    fault = {error.byte, std::string(why)};
    return SortedJson(SortedJson::value_t::discarded);
  }
}

template <class AnyJson>
std::string json_text(const AnyJson& value, int indent) {
  return value.dump(indent, ' ', false, AnyJson::error_handler_t::replace);
}

template Json parse_json(std::string_view);
template SortedJson parse_json(std::string_view);
template std::string json_text(const Json&, int);
template std::string json_text(const SortedJson&, int);

Json with_finite_numbers(Json value) {
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::isnan(number)) return "nan";
    if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  } else if (value.is_structured()) {
    for (auto& member : value) member = with_finite_numbers(std::move(member));
  }
  return value;
}

std::string finite_json_text(const Json& value, int indent) { return json_text(with_finite_numbers(value), indent); }

}  // namespace weft
