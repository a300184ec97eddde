// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/keys/config_keys.hpp"

#include <cmath>

#include "base/text.hpp"

namespace weft::language_model {

const SortedJson* ConfigKeys::find(const char* key) {
  known_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

std::int64_t ConfigKeys::integer(const char* key, std::int64_t most, std::int64_t least) {
  const SortedJson* const value = find(key);
  if (value == nullptr) throw damaged("\"{}\" is missing; is it the config.json of a language model?", key);
  if (!value->is_number_unsigned() || *value < least || *value > most)
    throw damaged("\"{}\" is not an integer from {} to {}", key, least, most);
  return value->get<std::int64_t>();
}

double ConfigKeys::number(const char* key, NumberRange range) {
  if (find(key) == nullptr) throw damaged("\"{}\" is missing; is it the config.json of a language model?", key);
  return number_or(key, 0, range);
}

double ConfigKeys::number_or(const char* key, double absent, NumberRange range) {
  const SortedJson* const value = find(key);
  if (value == nullptr) return absent;
  if (!value->is_number() || !(value->get<double>() > 0) || !std::isfinite(value->get<double>()))
    throw damaged("\"{}\" is not a number above 0", key);
  const auto number = value->get<double>();
  if (number < range.least || number > range.most)
    throw lacking("\"{}\" = {} ({:.3g} to {:.3g} are supported)", key, number, range.least, range.most);
  return number;
}

bool ConfigKeys::flag(const char* key, bool absent) {
  const SortedJson* const value = find(key);
  if (value == nullptr) return absent;
  if (!value->is_boolean()) throw damaged("\"{}\" is neither true nor false", key);
  return value->get<bool>();
}

std::string ConfigKeys::text_or(const char* key, const char* absent) {
  const SortedJson* const value = find(key);
  if (value == nullptr) return absent;
  if (!value->is_string()) throw damaged("\"{}\" is not a text", key);
  return value->get<std::string>();
}

void ConfigKeys::require(const char* key, bool needed) {
  if (flag(key, needed) != needed) throw lacking("\"{}\" = {} (Weft computes with {})", key, !needed, needed);
}

void ConfigKeys::require_absent(const char* key) {
  if (find(key) != nullptr) throw lacking("\"{}\" is not supported", key);
}

void ConfigKeys::refuse_unknown() const {
  for (const auto& [key, value] : object_.items())
    if (!value.is_null() && !known_.contains(key))
      throw lacking("the key \"{}\" is not known (it may change what the model computes)", printable(key));
}

}  // namespace weft::language_model
