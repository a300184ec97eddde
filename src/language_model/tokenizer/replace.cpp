// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/replace.hpp"

#include "base/text.hpp"

namespace weft::language_model {

std::optional<Expression::Match> Replace::find(std::string_view text, std::size_t begin, const TextPlace& place) const {
  if (expression_) return expression_->find(text, begin, place);
  const std::size_t at = text.find(text_, begin);
  if (at == text.npos) return std::nullopt;
  return Expression::Match{at, at + text_.size()};
}

void Replace::apply(NormalisedText& text, const TextPlace& place) const {
  std::string changed;
  std::size_t done = 0;
  while (const auto match = find(text.text, done, place)) {
    // The library gives what it inserts the place of the last character that it removes.
    if (match->begin == 0 && (content_.empty() || first_character(text.text).bytes < match->end)) text.at_start = false;
    changed.append(text.text, done, match->begin - done).append(content_);
    done = match->end;
  }
  if (done == 0) return;
  changed.append(text.text, done);
  text.text = std::move(changed);
}

}  // namespace weft::language_model
