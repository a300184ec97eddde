// SPDX-License-Identifier: Apache-2.0
//
// Durable file operations. A file survives a power failure after fsync of the file and of its directory; a rename after
// fsync of the directory. All functions throw Error(io) with the path and the text of errno.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "base/file.hpp"

namespace weft::storage {

void sync_file(const std::filesystem::path& path);
/// Ignores EINVAL of file systems that cannot sync directories.
void sync_directory(const std::filesystem::path& path);

/// Writes parts of a file to disk while the rest is still being produced, so that the final fsync is short. Keeps one
/// descriptor open throughout: Linux reports a write error once, to descriptors that were open at that time.
class Writeback {
 public:
  explicit Writeback(const std::filesystem::path& path);

  /// Starts to write bytes [begin, end) to disk. A hint; does not wait.
  void begin(std::int64_t begin, std::int64_t end) const;
  /// Waits until these bytes are on disk and drops them from the page cache, which keeps the cache for other data, such
  /// as the training set. Does nothing if the file system does not support it.
  void release(std::int64_t begin, std::int64_t end) const;
  /// fsync of the whole file.
  void finish() const;

 private:
  std::filesystem::path path_;
  Descriptor descriptor_;
};

/// Creates the directory and its missing parents, and syncs each in the directory that holds it.
void make_directory(const std::filesystem::path& path);

/// rename(2), then fsync of the directory that holds `to`.
void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to);

/// Writes and syncs a new file, in place of a file or symbolic link of this name. Not atomic: for files in a directory
/// that is renamed later.
void write_text(const std::filesystem::path& path, std::string_view text);
/// Replaces a file atomically: temporary file in the same directory, fsync, rename, fsync of the directory.
void write_text_atomically(const std::filesystem::path& path, std::string_view text);

/// Of a regular file. Throws Error(io) if it is longer than `at_most` bytes.
std::string read_text(const std::filesystem::path& path, std::int64_t at_most);
/// Of an open file, from its position.
std::string read_text(const Descriptor& file, const std::filesystem::path& path, std::int64_t at_most);

/// Free bytes for this user in the file system of `path`; -1 if unknown.
std::int64_t free_bytes(const std::filesystem::path& path);

}  // namespace weft::storage
