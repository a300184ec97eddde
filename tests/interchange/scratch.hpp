// SPDX-License-Identifier: Apache-2.0
//
// A temporary directory, and the message of an expected error.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/error.hpp"
#include "tests/test.hpp"

namespace weft::testing {

struct Scratch {
  std::filesystem::path path;
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "weft_interchange_XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path = pattern;
  }
  ~Scratch() { std::filesystem::remove_all(path); }
};

/// The message of the Error with this code that `call` throws.
template <class Call>
std::string refusal(ExitCode code, Call&& call) {
  try {
    call();
  } catch (const Error& refused) {
    CHECK(refused.code() == code);
    return refused.what();
  }
  FAIL_CHECK("nothing was thrown");
  return "";
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

}  // namespace weft::testing
