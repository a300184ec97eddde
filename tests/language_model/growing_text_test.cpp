// SPDX-License-Identifier: Apache-2.0
#include "language_model/generation/growing_text.hpp"

#include "tests/test.hpp"

namespace weft::language_model {
namespace {

/// Appends each byte as a token, until the text ends.
GrowingText grown(const Tokenizer& tokenizer, const std::string& bytes, const std::vector<std::string>& stops,
                  const std::vector<std::uint32_t>& ends = {}) {
  GrowingText text(tokenizer, stops, ends);
  for (const char byte : bytes)
    if (text.append(static_cast<unsigned char>(byte)) != GrowingText::End::none) break;
  return text;
}

}  // namespace

TEST_CASE("a text ends before the first of its stop texts, wherever tokens begin and end") {
  const Tokenizer tokenizer = Tokenizer::bytes({});
  struct Expected {
    std::string text, result;
    std::vector<std::string> stops;
    GrowingText::End end;
  };
  const Expected cases[] = {{"one two three", "one ", {"two"}, GrowingText::End::stop},
                            {"one two three", "one two three", {"four"}, GrowingText::End::none},
                            {"aab", "a", {"ab"}, GrowingText::End::stop},
                            {"x\n\ny", "x", {"zz", "\n\n"}, GrowingText::End::stop},
                            {"abcd", "a", {"cd", "bc"}, GrowingText::End::stop},
                            {"stop", "", {"stop"}, GrowingText::End::stop}};
  for (const Expected& expected : cases) {
    CAPTURE(expected.text);
    const GrowingText text = grown(tokenizer, expected.text, expected.stops);
    CHECK(text.text() == expected.result);
    CHECK(text.end() == expected.end);
  }
  // Of two stop texts that end in one token, the one that begins first.
  const Tokenizer words = Tokenizer::characters_of("abc", {}, "test");
  GrowingText text(words, std::vector<std::string>{}, {});
  CHECK(text.tokens() == 0);
}

TEST_CASE("a text ends before a symbol that ends documents") {
  const Tokenizer tokenizer = Tokenizer::bytes({"EOS"});
  const std::vector<std::uint32_t> ends = end_symbols(tokenizer);
  REQUIRE(ends == std::vector<std::uint32_t>{256});
  GrowingText text(tokenizer, {}, ends);
  CHECK(text.append('h') == GrowingText::End::none);
  CHECK(text.append(256) == GrowingText::End::symbol);
  CHECK(text.text() == "h");
  CHECK(text.tokens() == 2);
  CHECK(end_symbols(Tokenizer::bytes({})).empty());
  // Those of the files beside a tokenizer.json come first, each once.
  SpecialTokens special;
  special.ends = {7, 256};
  CHECK(end_symbols(tokenizer.with(special)) == std::vector<std::uint32_t>{7, 256});
}

TEST_CASE("the text is valid UTF-8 while characters are incomplete") {
  const Tokenizer tokenizer = Tokenizer::bytes({});
  CHECK(grown(tokenizer, "na\xc3\xafve", {}).text() == "na\xc3\xafve");
  CHECK(grown(tokenizer, "na\xc3", {}).text() == "na\xef\xbf\xbd");
  CHECK(grown(tokenizer, "\xf0\x9f\x98", {}).text() == "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
  CHECK(grown(tokenizer, "a\xff b", {}).text() == "a\xef\xbf\xbd b");
  // A stop text of several bytes per character, in tokens of one byte each.
  CHECK(grown(tokenizer, "caf\xc3\xa9!", {"\xc3\xa9"}).text() == "caf");
}

}  // namespace weft::language_model
