// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/pattern.hpp"

#include <algorithm>
#include <array>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

// Contents of classes. PCRE2's \s contains U+180E, which is no white space since Unicode 6.3.
constexpr const char *kWhite = "\\t-\\r\\x{85}\\p{Z}", *kDigit = "\\p{Nd}", *kHexadecimal = "0-9A-Fa-f",
                     *kWord = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}";
constexpr int kDeepest = 64;

constexpr std::array<std::string_view, 38> kCategories = {
    "C",  "Cc", "Cf", "Cn", "Co", "Cs", "L",  "Ll", "Lm", "Lo", "Lt", "Lu", "M",  "Mc", "Me", "Mn", "N",  "Nd", "Nl",
    "No", "P",  "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "S",  "Sc", "Sk", "Sm", "So", "Z",  "Zl", "Zp", "Zs", "Any"};

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

/// Text of a literal character in a pattern or a class.
std::string escaped(long code) {
  if (code < 0x80 && (is_letter(static_cast<char>(code)) || is_digit(static_cast<char>(code))))
    return std::string(1, static_cast<char>(code));
  return fmt::format("\\x{{{:x}}}", code);
}

/// Meaning of an escape: one character, or a set of them.
struct Escape {
  long code = -1;             ///< of a character
  std::string contents = {};  ///< of a class, for a set
  bool negated = false;       ///< the characters that are not in it

  std::string text() const { return code >= 0 ? escaped(code) : fmt::format("[{}{}]", negated ? "^" : "", contents); }
};

class Translation {
 public:
  Translation(std::string_view pattern, std::string_view source) : pattern_(pattern), rest_(pattern), source_(source) {}

  std::string result() {
    if (first_invalid(pattern_) != pattern_.npos) throw refuse("is not valid UTF-8");
    std::string text = alternatives(0);
    if (!rest_.empty()) throw refuse("has a \")\" too many");
    return text;
  }

 private:
  Error refuse(std::string_view why) const {
    return error(ExitCode::data, "{}the splitting pattern \"{}\" {} (at {})", source_, printable(pattern_), why,
                 pattern_.size() - rest_.size());
  }
  Error unknown(std::string_view what) const {
    return refuse(fmt::format("has \"{}\", whose meaning to Oniguruma is not known to Weft", printable(what)));
  }

  char next() const { return rest_.empty() ? '\0' : rest_[0]; }
  bool take(std::string_view text) {
    if (!rest_.starts_with(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }
  long take_character() {
    const Character character = first_character(rest_);
    rest_.remove_prefix(character.bytes);
    return character.code;
  }

  std::string alternatives(int depth) {
    if (depth > kDeepest) throw refuse(fmt::format("has more than {} levels of groups", kDeepest));
    std::string text = branch(depth);
    while (take("|")) text.append("|").append(branch(depth));
    return text;
  }

  std::string branch(int depth) {
    std::string text;
    last_literal_ = '\0';
    while (!rest_.empty() && next() != '|' && next() != ')') text += quantified(atom(depth));
    return text;
  }

  std::string atom(int depth) {
    if (take("(")) return group(depth);
    if (take("[")) return outside_case([&] { return character_class(depth); });
    const std::string_view here = rest_.substr(0, 1);
    if (take("$")) return "(?=\\n|\\z)";
    if (take("\\z")) return "\\z";
    if (here == "^" || here == "*" || here == "+" || here == "?" || here == "{") throw unknown(here);
    if (take(".")) return outside_case([] { return "[^\\n]"; });
    if (take("\\")) {
      const Escape escape = this->escape();
      if (escape.code >= 0) return literal(escape.code);
      if (ignores_case_) throw refuse("has a class in (?i:…) with more than letters and digits");
      last_literal_ = '\0';
      return escape.text();
    }
    return literal(take_character());
  }

  /// In a group (?i:…) texts of two letters can match one character ("ss" and the German sharp s), a class can match
  /// two: PCRE2 does not.
  std::string literal(long code) {
    const char letter = code < 0x80 ? lower(static_cast<char>(code)) : '\0';
    if (ignores_case_) {
      const std::string pair = {last_literal_, letter};
      if (code >= 0x80 || pair == "ss" || pair == "st" || pair == "ff" || pair == "fi" || pair == "fl")
        throw refuse("has letters in (?i:…) that Oniguruma compares with ligatures");
    }
    last_literal_ = letter;
    return escaped(code);
  }
  template <class Text>
  std::string outside_case(const Text& text) {
    last_literal_ = '\0';
    const std::size_t begin = pattern_.size() - rest_.size();
    const std::string result = text();
    const std::string_view source = pattern_.substr(begin, pattern_.size() - rest_.size() - begin);
    if (ignores_case_ &&
        std::any_of(source.begin(), source.end(), [](char c) { return !is_letter(c) && !is_digit(c) && c != ']'; }))
      throw refuse("has a class in (?i:…) with more than letters and digits");
    return result;
  }

  std::string group(int depth) {
    const bool before = ignores_case_;
    std::string open = "(?:";
    if (take("?")) {
      const std::string_view kinds[] = {":", "=", "!", "<=", "<!", ">", "i:", "-i:"};
      const auto* const kind =
          std::find_if(std::begin(kinds), std::end(kinds), [&](std::string_view one) { return take(one); });
      if (kind == std::end(kinds)) throw unknown(fmt::format("(?{}", rest_.substr(0, 2)));
      open = fmt::format("(?{}", *kind);
      if (kind->ends_with("i:")) ignores_case_ = *kind == "i:";
    }
    std::string text = fmt::format("{}{})", open, alternatives(depth + 1));
    if (!take(")")) throw refuse("has a \"(\" without its \")\"");
    ignores_case_ = before;
    last_literal_ = '\0';
    return text;
  }

  /// The atom with what repeats it.
  std::string quantified(std::string atom) {
    for (bool again = false;; again = true) {
      std::string quantifier;
      bool interval = false;
      if (next() == '?' || next() == '*' || next() == '+') {
        quantifier.push_back(next());
        rest_.remove_prefix(1);
      } else if (next() == '{') {
        quantifier = this->interval();
        interval = true;
      } else {
        return atom;
      }
      last_literal_ = '\0';
      // `{n}?` repeats what may be missing, `{m,n}+` is repeated itself: both are quantifiers of their own there.
      const bool exact = interval && quantifier.find(',') == quantifier.npos;
      if (!exact && take("?"))
        quantifier += "?";
      else if (!interval && take("+"))
        quantifier += "+";
      atom = again ? fmt::format("(?:{}){}", atom, quantifier) : atom + quantifier;
    }
  }

  std::string interval() {
    const std::size_t end = rest_.find('}');
    const std::string_view inside = end == rest_.npos ? "" : rest_.substr(1, end - 1);
    const std::size_t comma = inside.find(',');
    const std::string_view low = inside.substr(0, comma),
                           high = comma == inside.npos ? std::string_view() : inside.substr(comma + 1);
    const auto is_number = [](std::string_view text) {
      return text.size() < 6 && std::all_of(text.begin(), text.end(), is_digit);
    };
    if (inside.empty() || !is_number(low) || !is_number(high) || (low.empty() && high.empty()))
      throw unknown(rest_.substr(0, end == rest_.npos ? 1 : end + 1));
    if (!low.empty() && !high.empty() && std::stol(std::string(low)) > std::stol(std::string(high)))
      throw unknown(rest_.substr(0, end + 1));
    std::string text = fmt::format("{{{}{}{}}}", low.empty() ? "0" : low, comma == inside.npos ? "" : ",", high);
    rest_.remove_prefix(end + 1);
    return text;
  }

  /// Reads the characters after a backslash.
  Escape escape() {
    if (rest_.empty()) throw refuse("ends with \"\\\"");
    const char kind = rest_[0];
    if (!is_letter(kind) && !is_digit(kind)) return {.code = take_character()};
    const std::string_view name = rest_.substr(0, 1);
    const auto set = [&](const char* contents) {
      return Escape{.contents = contents, .negated = kind >= 'A' && kind <= 'Z'};
    };
    switch (kind) {
      case 's':
      case 'S':
        return rest_.remove_prefix(1), set(kWhite);
      case 'd':
      case 'D':
        return rest_.remove_prefix(1), set(kDigit);
      case 'w':
      case 'W':
        return rest_.remove_prefix(1), set(kWord);
      case 'h':
      case 'H':
        return rest_.remove_prefix(1), set(kHexadecimal);
      case 'p':
      case 'P':
        return property();
      case 'n':
        return rest_.remove_prefix(1), Escape{.code = '\n'};
      case 't':
        return rest_.remove_prefix(1), Escape{.code = '\t'};
      case 'r':
        return rest_.remove_prefix(1), Escape{.code = '\r'};
      case 'f':
        return rest_.remove_prefix(1), Escape{.code = '\f'};
      case 'v':
        return rest_.remove_prefix(1), Escape{.code = '\v'};
      case 'x':
      case 'u':
        return by_number();
      default:
        throw unknown(fmt::format("\\{}", name));
    }
  }

  /// \p{L}, \P{L}, \p{^L}; other names than those of categories are scripts.
  Escape property() {
    const bool outside = rest_[0] == 'P';
    const std::size_t end = rest_.find('}');
    if (!rest_.substr(1).starts_with("{") || end == rest_.npos) throw unknown(fmt::format("\\{}", rest_.substr(0, 2)));
    std::string_view name = rest_.substr(2, end - 2);
    const bool inverted = name.starts_with("^");
    if (inverted) name.remove_prefix(1);
    const bool category = std::find(kCategories.begin(), kCategories.end(), name) != kCategories.end();
    constexpr std::array<std::string_view, 14> other = {"Alnum", "Alpha", "Blank", "Cntrl", "Digit",  "Graph", "Lower",
                                                        "Print", "Punct", "Space", "Upper", "XDigit", "Word",  "ASCII"};
    if (!category && (name.size() < 3 || !std::all_of(name.begin(), name.end(), is_letter) ||
                      std::find(other.begin(), other.end(), name) != other.end()))
      throw unknown(fmt::format("\\{}", rest_.substr(0, end + 1)));
    Escape escape{.contents = fmt::format("\\p{{{}{}}}", category ? "" : "sc:", name), .negated = outside != inverted};
    rest_.remove_prefix(end + 1);
    return escape;
  }

  /// \xHH below 0x80, \x{H…}, \uHHHH.
  Escape by_number() {
    const bool braces = rest_.substr(1).starts_with("{");
    const std::size_t begin = braces ? 2 : 1, end = braces ? rest_.find('}') : begin + (rest_[0] == 'u' ? 4 : 2);
    const std::string digits(end == rest_.npos || end > rest_.size() ? "" : rest_.substr(begin, end - begin));
    const bool valid = !digits.empty() && digits.size() <= 6 && (!braces || rest_[0] == 'x') &&
                       digits.find_first_not_of("0123456789abcdefABCDEF") == digits.npos;
    const long code = valid ? std::stol(digits, nullptr, 16) : -1;
    if (code < 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ||
        (rest_[0] == 'x' && !braces && code >= 0x80))  // a byte
      throw unknown(fmt::format("\\{}", rest_.substr(0, end == rest_.npos ? 1 : end)));
    rest_.remove_prefix(end + (braces ? 1 : 0));
    return {.code = code};
  }

  /// After "[". An expression that matches one character: unions of classes, with intersections by looking ahead.
  std::string character_class(int depth) {
    if (depth > kDeepest) throw refuse(fmt::format("has more than {} levels of classes", kDeepest));
    const bool negated = take("^");
    if (next() == ']') throw unknown("[]");
    std::vector<std::string> terms;
    std::string contents;                   // of the present term
    std::vector<std::string> alternatives;  // of it, in addition to them
    const auto end_term = [&] {
      if (!contents.empty()) alternatives.insert(alternatives.begin(), fmt::format("[{}]", contents));
      if (alternatives.empty()) throw unknown("&&");
      std::string term = alternatives[0];
      for (std::size_t i = 1; i < alternatives.size(); ++i) term.append("|").append(alternatives[i]);
      terms.push_back(alternatives.size() == 1 ? term : fmt::format("(?:{})", term));
      contents.clear();
      alternatives.clear();
    };
    bool plain = true;
    while (!take("]")) {
      if (rest_.empty()) throw refuse("has a \"[\" without its \"]\"");
      if (take("&&")) {
        end_term();
        plain = false;
      } else if (rest_.starts_with("[:")) {
        throw unknown("[:");
      } else if (take("[")) {
        alternatives.push_back(character_class(depth + 1));
        plain = false;
      } else {
        const Escape low = member();
        if (low.code < 0 && low.negated) {
          alternatives.push_back(low.text());
          plain = false;
        } else if (low.code < 0) {
          contents += low.contents;
          if (next() == '-' && rest_.substr(1, 1) != "]") throw unknown(rest_.substr(0, 2));
        } else {
          contents += escaped(low.code);
          if (next() == '-' && rest_.substr(1, 1) != "]") {
            take("-");
            if (rest_.starts_with("[") || rest_.starts_with("&&"))
              throw unknown(fmt::format("-{}", rest_.substr(0, 1)));
            const Escape high = rest_.empty() ? Escape{} : member();
            if (high.code < low.code) throw refuse("has a range in a class that has no end, or ends before it begins");
            contents.append("-").append(escaped(high.code));
          }
        }
      }
    }
    if (plain) return fmt::format("[{}{}]", negated ? "^" : "", contents);
    end_term();
    std::string all = terms.back();
    for (auto term = terms.rbegin() + 1; term != terms.rend(); ++term) all = fmt::format("(?={}){}", *term, all);
    if (negated) return fmt::format("(?:(?!{})(?s:.))", all);
    return fmt::format("(?:{})", all);
  }

  Escape member() {
    if (take("\\")) return escape();
    return {.code = take_character()};
  }

  std::string_view pattern_, rest_, source_;
  bool ignores_case_ = false;
  char last_literal_ = '\0';  // in (?i:…)
};

}  // namespace

std::string pcre2_pattern(std::string_view oniguruma, std::string_view source) {
  return Translation(oniguruma, source).result();
}

std::string literal_pattern(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x80 && !is_letter(c) && !is_digit(c) && c > ' ' && c != 0x7f) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

}  // namespace weft::language_model
