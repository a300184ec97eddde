// SPDX-License-Identifier: Apache-2.0
//
// A regular file open for positioned reads. Thread-safe.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <string>

#include "base/file.hpp"

namespace weft::storage {

class PosixFile {
 public:
  /// Opens read-only. Throws Error(io).
  explicit PosixFile(const std::string& path);

  std::int64_t bytes() const { return bytes_; }
  /// Reads exactly `bytes` bytes at `offset`. Throws Error(data) if the file ends before, Error(io) if reading fails.
  void read(void* to, std::int64_t bytes, std::int64_t offset) const;
  /// Reads into several pieces, which are modified.
  void read(std::span<iovec> pieces, std::int64_t offset) const;

 private:
  std::string path_;
  Descriptor descriptor_;
  std::int64_t bytes_ = 0;
};

}  // namespace weft::storage
