// SPDX-License-Identifier: Apache-2.0
//
// Foreign text in messages cannot control the terminal, imitate a line of the log or fill it.
#include "base/text.hpp"

#include "base/log.hpp"
#include "tests/test.hpp"

namespace weft {

TEST_CASE("control characters, directional marks and invalid UTF-8 are escaped, other text is kept") {
  CHECK(printable("gpt2 é 中 𝒙 ~") == "gpt2 é 中 𝒙 ~");
  CHECK(printable("\x1b[2J\a\r\n\t\x7f") == "\\x1b[2J\\x07\\x0d\\x0a\\x09\\x7f");
  CHECK(printable(std::string_view("a\0b", 3)) == "a\\x00b");
  CHECK(printable("\xc2\x9b"
                  "31m") ==
        "\\xc2\\x9b"
        "31m");                                           // CSI as one character
  CHECK(printable("\xe2\x80\xae") == "\\xe2\\x80\\xae");  // right-to-left override
  CHECK(printable("\xff\xc0\xaf\xe2\x82") == "\\xff\\xc0\\xaf\\xe2\\x82");
  CHECK(printable("\xed\xa0\x80") == "\\xed\\xa0\\x80");  // a surrogate
}

TEST_CASE("long text is cut") {
  CHECK(printable(std::string(1000, 'x'), 10) == "xxxxxxxxxx…");
  CHECK(printable("xxxxxxxxxx", 10) == "xxxxxxxxxx");
  CHECK(printable(std::string(1000, '\1'), 10) == "\\x01\\x01\\x01…");
}

TEST_CASE("log lines keep newlines, and nothing else that a terminal interprets") {
  std::string seen;
  log::set_sink([&](log::Level, std::string_view line) { seen = line; });
  log::info("a\n\tb \x1b[31mred");
  log::set_sink([](log::Level, std::string_view) {});
  CHECK(seen == "a\n\tb \\x1b[31mred");
}

TEST_CASE("UTF-8 is decoded and encoded; the first invalid byte is found") {
  std::string all;
  for (const long code : {0x0L, 0x7fL, 0x80L, 0x7ffL, 0x800L, 0xd7ffL, 0xe000L, 0xffffL, 0x10000L, 0x10ffffL}) {
    std::string one;
    append_character(one, code);
    CHECK(first_character(one).code == code);
    CHECK(first_character(one).bytes == one.size());
    all += one;
  }
  CHECK(first_invalid(all) == std::string_view::npos);
  CHECK(first_invalid("") == std::string_view::npos);
  CHECK(first_invalid("ab\xc3") == 2);            // cut off
  CHECK(first_invalid("é\xc0\xaf") == 2);         // overlong
  CHECK(first_invalid("abc\xed\xa0\x80") == 3);   // a surrogate
  CHECK(first_invalid("\xf4\x90\x80\x80") == 0);  // beyond Unicode
  CHECK(first_invalid("a\x80") == 1);             // a continuation byte alone
}

}  // namespace weft
