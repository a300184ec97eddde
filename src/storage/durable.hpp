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

/// Sends what has been written so far on its way to the disk, without waiting for it: then little is left to do for the
/// fsync at the end, and the disk works while the processor still does. A hint: it promises nothing and cannot fail.
class Writeback {
 public:
  explicit Writeback(const std::filesystem::path& path);
  Writeback(const Writeback&) = delete;
  ~Writeback();
  void begin() const;

 private:
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
