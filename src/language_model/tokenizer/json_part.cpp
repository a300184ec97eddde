// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/json_part.hpp"

#include <algorithm>

#include "base/json.hpp"
#include "base/text.hpp"

namespace weft::language_model {

using nlohmann::json;

Error JsonPart::unsupported(std::string_view what) const {
  return refuse("has the {} \"{}\" (not supported)", what, printable(type()));
}

const json* JsonPart::member(std::string_view name) const {
  if (!value_->is_object()) return nullptr;
  const auto found = value_->find(name);
  return found == value_->end() || found->is_null() ? nullptr : &*found;
}

std::string JsonPart::text(std::string_view name, std::string_view missing) const {
  const json* found = member(name);
  if (found == nullptr) return std::string(missing);
  if (!found->is_string()) throw refuse("\"{}{}\" is not a text", where_, name);
  return found->get<std::string>();
}

bool JsonPart::flag(std::string_view name, bool missing) const {
  const json* found = member(name);
  if (found == nullptr) return missing;
  if (!found->is_boolean()) throw refuse("\"{}{}\" is neither true nor false", where_, name);
  return found->get<bool>();
}

std::size_t JsonPart::number(std::string_view name, std::size_t bound) const {
  const json* found = member(name);
  if (found == nullptr || !found->is_number_unsigned() || *found >= bound)
    throw refuse("\"{}{}\" is not an integer in [0, {})", where_, name, bound);
  return found->get<std::size_t>();
}

JsonPart JsonPart::object(std::string_view name) const {
  const json* found = member(name);
  if (found == nullptr || !found->is_object())
    throw refuse("\"{}{}\" is missing; is it a tokenizer.json?", where_, name);
  return {*found, source_, fmt::format("{}{}.", where_, name)};
}

const json& JsonPart::list(std::string_view name) const {
  const json* found = member(name);
  if (found == nullptr || !found->is_array())
    throw refuse("\"{}{}\" is missing; is it a tokenizer.json?", where_, name);
  return *found;
}

std::vector<JsonPart> JsonPart::steps(std::string_view name) const {
  if (!value_->is_object()) throw refuse("\"{}\" is not an object", where_);
  if (type() != "Sequence") return {*this};
  require_known({"type", name});
  std::vector<JsonPart> all;
  for (const json& step : list(name))
    for (JsonPart& part : JsonPart(step, source_, where_).steps(name)) all.push_back(std::move(part));
  return all;
}

void JsonPart::require_known(std::initializer_list<std::string_view> known) const {
  for (const auto& [key, value] : value_->items())
    if (!value.is_null() && std::find(known.begin(), known.end(), key) == known.end())
      throw refuse("has the key \"{}{}\" (not known; it could change the ids)", where_, printable(key));
}

}  // namespace weft::language_model
