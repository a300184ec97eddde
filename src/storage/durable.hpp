// SPDX-License-Identifier: Apache-2.0
//
// What survives a power cut. A file is durable when it has been fsynced and so has the directory that names it; a
// rename is durable when the parent directory has been fsynced. All functions throw Error(io) with the path and errno's
// text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace weft::storage {

void sync_file(const std::filesystem::path& path);
/// File systems that cannot sync a directory (EINVAL) are taken at their word.
void sync_directory(const std::filesystem::path& path);

/// Moves a file to the disk part by part while the rest of it is still being written: then little is left to do for the
/// fsync at the end, and the disk works while the processor still does. One descriptor from beginning to end: Linux
/// tells each write error once, to those who had the file open.
class Writeback {
 public:
  explicit Writeback(const std::filesystem::path& path);
  Writeback(const Writeback&) = delete;
  ~Writeback();

  /// Sends bytes [begin, end) on their way, without waiting for them. A hint.
  void begin(std::int64_t begin, std::int64_t end) const;
  /// Waits until they have left, then lets go of their copy in the page cache: the next part gets the same memory, and
  /// what others have in the cache, such as the data that training reads, stays there. Where the file system cannot, it
  /// does nothing.
  void release(std::int64_t begin, std::int64_t end) const;
  /// All of the file is durable: fsync.
  void finish() const;

 private:
  std::filesystem::path path_;
  int descriptor_;
};

/// rename(2), then fsync of the directory that holds `to`.
void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to);

/// Writes and syncs a new or replaced file. Not atomic: for a file in a directory that is renamed as a whole.
void write_text(const std::filesystem::path& path, std::string_view text);
/// The reader sees the old text or the new one: temporary beside it, fsync, rename, fsync of the directory.
void write_text_atomically(const std::filesystem::path& path, std::string_view text);

/// Throws Error(io) when the file is longer than `at_most` bytes.
std::string read_text(const std::filesystem::path& path, std::int64_t at_most);

/// Bytes free for this user where `path` lies; -1 when unknown.
std::int64_t free_bytes(const std::filesystem::path& path);

}  // namespace weft::storage
