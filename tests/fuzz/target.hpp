// SPDX-License-Identifier: Apache-2.0
//
// A fuzz target is a function of arbitrary bytes that must return. It may reject the bytes with an Error of an expected
// code. Anything else (an internal error, another exception, a signal, a sanitizer report) is a finding.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "base/error.hpp"

/// Called by libFuzzer or replay.cpp. Returns 0.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace weft::fuzz {

/// Aborts with a message: a finding that sanitizers do not detect.
[[noreturn]] inline void finding(const std::string& why) {
  std::fprintf(stderr, "finding: %s\n", why.c_str());
  std::abort();
}

/// True if `read` returned, false if it threw an Error with one of `codes`.
template <class Read>
bool accepts(std::initializer_list<ExitCode> codes, Read&& read) {
  try {
    read();
    return true;
  } catch (const Error& refusal) {
    for (const ExitCode code : codes)
      if (refusal.code() == code) return false;
    finding(fmt::format("code {} with \"{}\"", static_cast<int>(refusal.code()), refusal.what()));
  }
}

inline std::string_view text(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Reads bytes as decisions; zeros after the end.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : bytes_(data, size) {}

  std::uint8_t byte() {
    if (bytes_.empty()) return 0;
    const std::uint8_t value = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return value;
  }
  bool one_in(int n) { return byte() % n == n - 1; }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[byte() % values.size()];
  }
  std::span<const std::uint8_t> rest() const { return bytes_; }

 private:
  std::span<const std::uint8_t> bytes_;
};

/// A temporary directory of this process, in TMPDIR if set.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "weft_fuzz_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) finding("no temporary directory");
    path_ = pattern;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const char* name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline void write_file(const std::string& path, const std::uint8_t* data, std::size_t size) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
}

}  // namespace weft::fuzz
