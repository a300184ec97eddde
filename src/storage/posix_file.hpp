// SPDX-License-Identifier: Apache-2.0
//
// A file open for reading at any place, by any number of threads.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <string>

namespace weft::storage {

class PosixFile {
 public:
  /// Opens read-only. Throws Error(io).
  explicit PosixFile(const std::string& path);
  PosixFile(const PosixFile&) = delete;
  ~PosixFile();

  std::int64_t bytes() const { return bytes_; }
  /// Exactly `bytes` bytes from `offset`. Throws Error(data) when the file ends before, Error(io) when reading fails.
  void read(void* to, std::int64_t bytes, std::int64_t offset) const;
  /// The same into pieces, which are used up.
  void read(std::span<iovec> pieces, std::int64_t offset) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::int64_t bytes_ = 0;
};

}  // namespace weft::storage
