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

}  // namespace weft
