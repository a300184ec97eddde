// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/added_tokens.hpp"

#include <algorithm>
#include <unordered_set>

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

/// Where the last character of a text that is not empty begins.
std::size_t last_character(std::string_view text) {
  std::size_t at = text.size() - 1;
  while (at > 0 && (text[at] & 0xc0) == 0x80) --at;
  return at;
}

bool ends_with_word(std::string_view text) {
  return !text.empty() && is_word_character(first_character(text.substr(last_character(text))).code);
}
bool starts_with_word(std::string_view text) { return !text.empty() && is_word_character(first_character(text).code); }

std::size_t white_space_at_end(std::string_view text) {
  std::size_t end = text.size();
  while (end > 0) {
    const std::size_t last = last_character(text.substr(0, end));
    if (!is_white_space(first_character(text.substr(last)).code)) break;
    end = last;
  }
  return text.size() - end;
}
std::size_t white_space_at_start(std::string_view text) {
  std::size_t begin = 0;
  while (begin < text.size()) {
    const Character next = first_character(text.substr(begin));
    if (!is_white_space(next.code)) break;
    begin += next.bytes;
  }
  return begin;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, const Normalisers& normalisers, std::string_view source)
    : tokens_(std::move(tokens)), forms_(tokens_.size()) {
  const auto refuse = [&](const std::string& why) {
    return error(ExitCode::data, "{}: {}; is it complete?", source, why);
  };
  std::vector<Prefixes::Entry> in_text, in_normalised;
  std::unordered_set<std::string_view> contents, forms;
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const AddedToken& token = tokens_[i];
    if (token.content.empty()) throw refuse(fmt::format("added token {} is empty", token.id));
    if (!contents.insert(token.content).second)
      throw refuse(fmt::format("added token \"{}\" exists twice", printable(token.content)));
    if (!by_id_.emplace(token.id, i).second)
      throw refuse(fmt::format("added token {} has an id that is not its own", token.id));
    NormalisedText form{token.content};
    if (token.normalized) normalise(normalisers, form, {source, token.content});
    forms_[i] = std::move(form.text);
    if (forms_[i].empty())
      throw refuse(fmt::format("the normaliser leaves nothing of added token \"{}\"", printable(token.content)));
    if (token.normalized && !forms.insert(forms_[i]).second)
      throw refuse(fmt::format("added token \"{}\" is equal to another one when normalised", printable(token.content)));
    (token.normalized ? in_normalised : in_text).emplace_back(forms_[i], static_cast<std::uint32_t>(i));
  }
  in_text_ = Prefixes(std::move(in_text));
  in_normalised_ = Prefixes(std::move(in_normalised));
}

const AddedToken* AddedTokens::find(std::uint32_t id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

const std::string& AddedTokens::form(const AddedToken& token) const { return forms_[by_id_.at(token.id)]; }

void AddedTokens::split(std::string_view whole, bool normalized, const TextSink& text, const IdSink& id) const {
  const Prefixes& prefixes = normalized ? in_normalised_ : in_text_;
  std::size_t done = 0;
  for (std::size_t at = 0; at < whole.size() && !prefixes.empty();) {
    std::size_t length = 0, index = 0;
    prefixes.each(whole.substr(at), [&](std::size_t longest, std::uint32_t number) {
      length = longest;
      index = number;
    });
    if (length == 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[index];
    std::size_t begin = at, end = at + length;
    at = end;  // the search goes on after the content, whether the token counts or takes more
    if (token.single_word && (ends_with_word(whole.substr(0, begin)) || starts_with_word(whole.substr(end)))) continue;
    if (token.lstrip) begin = std::max(begin - white_space_at_end(whole.substr(0, begin)), done);
    if (token.rstrip) end += white_space_at_start(whole.substr(end));
    if (done < begin) text(whole.substr(done, begin - done));
    id(token.id);
    done = end;
  }
  if (done < whole.size()) text(whole.substr(done));
}

bool AddedTokens::cuts_before_spaces() const {
  return std::none_of(tokens_.begin(), tokens_.end(), [&](const AddedToken& token) {
    return token.lstrip || token.rstrip || token.content.find(' ') != token.content.npos ||
           form(token).find(' ') != std::string::npos;
  });
}

}  // namespace weft::language_model
