// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/bert_normaliser.hpp"

#include <algorithm>
#include <iterator>

#include "base/text.hpp"

namespace weft::language_model {
namespace {

/// The ranges that BERT calls Chinese characters, as the tokenizers library has them.
bool is_ideograph(long code) {
  constexpr std::pair<long, long> ranges[] = {{0x4e00, 0x9fff},   {0x3400, 0x4dbf},   {0x20000, 0x2a6df},
                                              {0x2a700, 0x2b73f}, {0x2b740, 0x2b81f}, {0x2b920, 0x2ceaf},
                                              {0xf900, 0xfaff},   {0x2f800, 0x2fa1f}};
  return std::any_of(std::begin(ranges), std::end(ranges),
                     [&](const auto& range) { return code >= range.first && code <= range.second; });
}

/// Calls change(character, code, text) for each character, which appends what stays of it.
template <class Change>
std::string changed(std::string_view text, const Change& change) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const Character next = first_character(text);
    change(text.substr(0, next.bytes), next.code, result);
    text.remove_prefix(next.bytes);
  }
  return result;
}

}  // namespace

void BertNormaliser::apply(NormalisedText& text, const TextPlace&) const {
  if (settings_.clean_text)
    text.text = changed(text.text, [](std::string_view character, long code, std::string& out) {
      const bool ends_line = code == '\t' || code == '\n' || code == '\r';
      if (code == 0xfffd || (!ends_line && is_other(code))) return;
      out += is_white_space(code) ? " " : character;
    });
  if (settings_.handle_chinese_chars)
    text.text = changed(text.text, [](std::string_view character, long code, std::string& out) {
      const char* const space = is_ideograph(code) ? " " : "";
      out.append(space).append(character).append(space);
    });
  if (settings_.strip_accents)
    text.text =
        changed(normal_form(text.text, UnicodeForm::nfd), [](std::string_view character, long code, std::string& out) {
          if (!is_nonspacing_mark(code)) out += character;
        });
  if (settings_.lowercase) text.text = lower_case(text.text);
}

}  // namespace weft::language_model
