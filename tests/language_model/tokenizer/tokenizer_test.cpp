// SPDX-License-Identifier: Apache-2.0
//
// Tokenisers of characters and bytes: round trips, the order of ids, special symbols, the stored form, refusals.
#include "language_model/tokenizer/tokenizer.hpp"

#include "base/text.hpp"
#include "tests/scratch.hpp"

namespace weft::language_model {
namespace {

/// Characters of every length in UTF-8, marks that combine, controls, and the ends of the ranges of code points.
std::string difficult_text() {
  std::string text = "Naïve café: 中文 😀👨‍👩‍👧 e\u0301 \t\r\n\u2028\u200f ﷽ don't 1234 ";
  text += '\0';
  for (const long code : {0x7fL, 0x80L, 0x7ffL, 0x800L, 0xd7ffL, 0xe000L, 0xffffL, 0x10000L, 0x10ffffL})
    append_character(text, code);
  return text;
}

}  // namespace

TEST_CASE("the ids of characters are the sorted code points of the corpus, without special symbols") {
  const Tokenizer tokenizer = Tokenizer::characters_of("cabbé", {}, "corpus");
  CHECK(tokenizer.kind() == "character");
  CHECK(tokenizer.vocabulary_size() == 4);
  CHECK(tokenizer.encode("abcé") == std::vector<std::uint32_t>{0, 1, 2, 3});
  CHECK(tokenizer.special("UNK") == -1);
  const Tokenizer more = Tokenizer::characters_of("cabbé", {"UNK", "EOS"}, "corpus");
  CHECK(more.vocabulary_size() == 6);
  CHECK(more.special("UNK") == 4);
  CHECK(more.special("EOS") == 5);
  CHECK(more.encode("az") == std::vector<std::uint32_t>{0, 4});
  CHECK(more.detokenise(std::vector<std::uint32_t>{0, 4, 5, 3}) == "a\ufffdé");
}

TEST_CASE("every valid text survives encoding and decoding, also through the stored form") {
  const std::string text = difficult_text();
  for (const Tokenizer& tokenizer : {Tokenizer::characters_of(text, {}, "t"), Tokenizer::bytes({}),
                                     Tokenizer::characters_of(text, {"PAD", "UNK"}, "t"), Tokenizer::bytes({"BOS"})}) {
    const Tokenizer stored = Tokenizer::from_text(tokenizer.text(), "stored");
    CHECK(stored.text() == tokenizer.text());
    CHECK(stored.vocabulary_size() == tokenizer.vocabulary_size());
    CHECK(stored.encode(text) == tokenizer.encode(text));
    CHECK(tokenizer.detokenise(tokenizer.encode(text)) == text);
  }
  CHECK(Tokenizer::bytes({}).encode("é") == std::vector<std::uint32_t>{0xc3, 0xa9});
  CHECK(Tokenizer::bytes({}).detokenise(Tokenizer::bytes({}).encode("\xff\x00z")) == "\xff\x00z");
}

TEST_CASE("unknown characters and invalid UTF-8 are refused with their place") {
  const Tokenizer tokenizer = Tokenizer::characters_of("abcé", {}, "corpus");
  CHECK(testing::refusal(ExitCode::data, [&] {
          tokenizer.encode("abéx", "new.txt");
        }).starts_with("new.txt: byte 4 is U+0078 (\"x\"), which is not in the vocabulary"));
  CHECK(testing::refusal(ExitCode::data, [&] {
          tokenizer.encode("ab\xff", "new.txt");
        }).starts_with("new.txt: byte 2 (0xff) is not valid UTF-8"));
  CHECK(testing::refusal(ExitCode::data, [&] {
          Tokenizer::characters_of("a\xc3", {}, "corpus");
        }).starts_with("corpus: byte 1 (0xc3) is not valid UTF-8"));
  CHECK(testing::refusal(ExitCode::data, [&] { tokenizer.detokenise(std::vector<std::uint32_t>{4}); }) ==
        "token 4 is not in the vocabulary of 4");
}

TEST_CASE("damaged stored forms are refused") {
  for (const char* text :
       {"", "[]", "{}", "{\"format\":\"weft-tokenizer\"", R"({"format":"weft-tokenizer","version":2,"kind":"bytes"})",
        R"({"format":"weft-tokenizer","version":1,"kind":"words"})",
        R"({"format":"weft-tokenizer","version":1,"kind":"bytes","special":[3]})",
        R"({"format":"weft-tokenizer","version":1,"kind":"character"})",
        R"({"format":"weft-tokenizer","version":1,"kind":"character","characters":[97,97]})",
        R"({"format":"weft-tokenizer","version":1,"kind":"character","characters":[55296]})",
        R"({"format":"weft-tokenizer","version":1,"kind":"character","characters":[1114112]})",
        R"({"format":"weft-tokenizer","version":1,"kind":"character","characters":[-1]})",
        R"({"format":"weft-tokenizer","version":1,"kind":"character","characters":[1.5]})"})
    CHECK(testing::refusal(ExitCode::data, [&] { Tokenizer::from_text(text, "f.json"); }).starts_with("f.json: "));
}

}  // namespace weft::language_model
