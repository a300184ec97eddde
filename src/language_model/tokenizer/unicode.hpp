// SPDX-License-Identifier: Apache-2.0
// Unicode properties and normal forms, by utf8proc. Texts are valid UTF-8.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace weft::language_model {

enum class UnicodeForm { nfc, nfd, nfkc, nfkd };

std::string normal_form(std::string_view text, UnicodeForm);
/// Each character in lower case, whatever the characters next to it.
std::string lower_case(std::string_view text);

bool is_white_space(long code);
/// Letters, marks, decimal digits, connectors and joiners: \w of Unicode's regular expressions.
bool is_word_character(long code);
/// Categories Mn, Mc, Me.
bool is_mark(long code);
/// Category Mn.
bool is_nonspacing_mark(long code);
/// Categories Cc, Cf, Co, Cs.
bool is_other(long code);

/// Calls `cluster` with each grapheme cluster of a text.
void each_grapheme(std::string_view text, const std::function<void(std::string_view)>& cluster);

}  // namespace weft::language_model
