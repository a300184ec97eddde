// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/unicode.hpp"

#include <utf8proc.h>

#include <memory>

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

utf8proc_category_t category_of(long code) { return utf8proc_category(static_cast<utf8proc_int32_t>(code)); }

}  // namespace

std::string normal_form(std::string_view text, UnicodeForm form) {
  int options = UTF8PROC_STABLE;
  options |= form == UnicodeForm::nfc || form == UnicodeForm::nfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == UnicodeForm::nfkc || form == UnicodeForm::nfkd) options |= UTF8PROC_COMPAT;
  utf8proc_uint8_t* made = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &made, static_cast<utf8proc_option_t>(options));
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(made, std::free);
  if (size < 0)
    throw error(ExitCode::data, "a text of {} bytes cannot be normalised ({})", text.size(), utf8proc_errmsg(size));
  return {reinterpret_cast<const char*>(made), static_cast<std::size_t>(size)};
}

std::string lower_case(std::string_view text) {
  std::string lower;
  lower.reserve(text.size());
  while (!text.empty()) {
    const Character next = first_character(text);
    if (next.code == 0x130)
      lower += "i\u0307";  // the only character whose lower case is two (SpecialCasing.txt)
    else
      append_character(lower, utf8proc_tolower(static_cast<utf8proc_int32_t>(next.code)));
    text.remove_prefix(next.bytes);
  }
  return lower;
}

bool is_white_space(long code) {
  if (code < 0x80) return code == ' ' || (code >= '\t' && code <= '\r');
  const utf8proc_category_t category = category_of(code);
  return code == 0x85 || category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
         category == UTF8PROC_CATEGORY_ZP;
}

bool is_mark(long code) {
  const utf8proc_category_t category = category_of(code);
  return category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC || category == UTF8PROC_CATEGORY_ME;
}

bool is_nonspacing_mark(long code) { return category_of(code) == UTF8PROC_CATEGORY_MN; }

bool is_other(long code) {
  const utf8proc_category_t category = category_of(code);
  return category == UTF8PROC_CATEGORY_CC || category == UTF8PROC_CATEGORY_CF || category == UTF8PROC_CATEGORY_CO ||
         category == UTF8PROC_CATEGORY_CS;
}

bool is_word_character(long code) {
  switch (category_of(code)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      // Letters in circles and squares are alphabetic symbols; the joiners U+200C and U+200D are part of words.
      return (code >= 0x24b6 && code <= 0x24e9) || (code >= 0x1f130 && code <= 0x1f149) ||
             (code >= 0x1f150 && code <= 0x1f169) || (code >= 0x1f170 && code <= 0x1f189) || code == 0x200c ||
             code == 0x200d;
  }
}

void each_grapheme(std::string_view text, const std::function<void(std::string_view)>& cluster) {
  utf8proc_int32_t state = 0;
  std::size_t begin = 0, at = 0;
  long previous = -1;
  while (at < text.size()) {
    const Character next = first_character(text.substr(at));
    if (previous >= 0 && utf8proc_grapheme_break_stateful(static_cast<utf8proc_int32_t>(previous),
                                                          static_cast<utf8proc_int32_t>(next.code), &state)) {
      cluster(text.substr(begin, at - begin));
      begin = at;
    }
    previous = next.code;
    at += next.bytes;
  }
  if (begin < text.size()) cluster(text.substr(begin));
}

}  // namespace weft::language_model
