// SPDX-License-Identifier: Apache-2.0
// A part of a tokenizer.json, and messages that name what of it is missing, wrong or not known.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace weft::language_model {

class JsonPart {
 public:
  /// `where`: names of the objects around it, "model.".
  JsonPart(const nlohmann::json& value, std::string_view source, std::string where = "")
      : value_(&value), source_(source), where_(std::move(where)) {}

  const nlohmann::json& value() const { return *value_; }
  std::string_view source() const { return source_; }

  template <class... Args>
  Error refuse(fmt::format_string<Args...> format, Args&&... args) const {
    return error(ExitCode::data, "{}: {}", source_, fmt::format(format, std::forward<Args>(args)...));
  }
  /// 'has the decoder "X" (not supported)'.
  Error unsupported(std::string_view what) const;

  /// Member of an object; null if it is missing or null.
  const nlohmann::json* member(std::string_view name) const;
  // Members of a type. All throw Error(data) for another type.
  std::string text(std::string_view name, std::string_view missing = "") const;
  bool flag(std::string_view name, bool missing = false) const;
  /// An integer in [0, bound), which must be there.
  std::size_t number(std::string_view name, std::size_t bound) const;
  /// An object, which must be there.
  JsonPart object(std::string_view name) const;
  /// A list, which must be there.
  const nlohmann::json& list(std::string_view name) const;

  std::string type() const { return text("type"); }
  /// The parts of a Sequence, whose list has this name, also of one in it; or the part alone.
  std::vector<JsonPart> steps(std::string_view name) const;
  /// Throws for a key, not null, that is not in the list.
  void require_known(std::initializer_list<std::string_view> known) const;

 private:
  const nlohmann::json* value_;
  std::string_view source_;
  std::string where_;
};

}  // namespace weft::language_model
