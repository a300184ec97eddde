// SPDX-License-Identifier: Apache-2.0
// Replaces every match of a pattern: a normaliser, and a step of decoding.
#pragma once

#include <optional>
#include <string>

#include "language_model/tokenizer/expression.hpp"
#include "language_model/tokenizer/normaliser.hpp"

namespace weft::language_model {

class Replace : public Normaliser {
 public:
  /// Replaces `text`, which is not empty and not a pattern.
  Replace(std::string text, std::string content) : text_(std::move(text)), content_(std::move(content)) {}
  Replace(Expression expression, std::string content)
      : expression_(std::move(expression)), content_(std::move(content)) {}

  void apply(NormalisedText&, const TextPlace&) const override;

 private:
  std::optional<Expression::Match> find(std::string_view text, std::size_t begin, const TextPlace&) const;

  std::string text_;
  std::optional<Expression> expression_;
  std::string content_;
};

}  // namespace weft::language_model
