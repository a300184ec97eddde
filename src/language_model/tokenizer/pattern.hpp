// SPDX-License-Identifier: Apache-2.0
//
// Splitting patterns of tokenizer.json files are regular expressions of Oniguruma with the syntax of Ruby. PCRE2 reads
// some of them otherwise: `&&` in a class is an intersection there, `{1,3}+` a repetition, `\h` a hexadecimal digit,
// `\w` contains marks, `\p{Han}` is a script without its extensions, `\v` is one character. The translation writes what
// it knows in terms with the same meaning in both; other expressions are an error.
#pragma once

#include <string>
#include <string_view>

namespace weft::language_model {

/// The pattern for PCRE2 with PCRE2_UTF and PCRE2_UCP. Throws Error(data) that begins with `source` and names the
/// pattern and the part of it that has no translation: anchors, `\b`, back references, options other than (?i:…), …
std::string pcre2_pattern(std::string_view oniguruma, std::string_view source = "");

/// A pattern that matches this text alone.
std::string literal_pattern(std::string_view text);

}  // namespace weft::language_model
