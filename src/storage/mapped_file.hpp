// SPDX-License-Identifier: Apache-2.0
//
// A regular file mapped into memory, read-only. Pages are read when they are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/file.hpp"

namespace weft::storage {

class MappedFile {
 public:
  /// Follows symbolic links. Throws Error(data) if the file is empty or not a regular file, SystemError(io) if mapping
  /// fails.
  explicit MappedFile(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }
  std::string_view text() const { return {static_cast<const char*>(data_), size_}; }  ///< the same bytes
  std::int64_t modified() const { return modified_; }                                 ///< nanoseconds since 1970

  /// Throws Error(data) if the file has become shorter: the process would be ended by a signal on reading beyond its
  /// end. Cheap; to be called before each use of the bytes.
  void require_whole() const;

 private:
  std::string path_;
  Descriptor descriptor_;
  void* data_ = nullptr;
  std::size_t size_ = 0;
  std::int64_t modified_ = 0;
};

}  // namespace weft::storage
