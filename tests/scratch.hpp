// SPDX-License-Identifier: Apache-2.0
//
// A temporary directory, and the message of an expected error.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "tests/test.hpp"

namespace weft::testing {

inline void write_file(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}
inline std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A temporary directory, the same on all ranks: the first one makes and removes it. Collective.
struct Scratch {
  std::filesystem::path path;
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "weft_test_XXXXXX").string();
    if (world().is_root()) REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path = world().all().broadcast(pattern);
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    world().all().barrier();
    std::error_code ignored;
    if (world().is_root()) std::filesystem::remove_all(path, ignored);
  }
  std::string operator/(const std::string& name) const { return (path / name).string(); }
  /// Writes a file, on this rank. Returns its path.
  std::string write(const std::string& name, std::string_view text) const {
    write_file(path / name, text);
    return *this / name;
  }
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
