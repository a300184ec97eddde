// SPDX-License-Identifier: Apache-2.0
// A regular expression of Oniguruma (pattern.hpp), compiled by PCRE2.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "language_model/tokenizer/text_place.hpp"

namespace weft::language_model {

class Expression {
 public:
  /// Throws Error(data) that begins with `source` for a pattern that cannot be translated or compiled, or that can
  /// match no character at all. `name`: of the pattern in messages, if it is not its text.
  explicit Expression(std::string_view pattern, std::string_view source = "", std::string_view name = "");

  struct Match {
    std::size_t begin, end;
  };
  /// The first match at or after `begin` in a valid UTF-8 text. Throws Error(data) that names the place if it exceeds
  /// PCRE2's limits of time and memory. Thread-safe.
  std::optional<Match> find(std::string_view text, std::size_t begin, const TextPlace&) const;

 private:
  std::string name_;
  std::shared_ptr<const void> code_;
};

}  // namespace weft::language_model
