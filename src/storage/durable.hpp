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

/// Creates the directory and its missing parents, and syncs each in the directory that holds it.
void make_directory(const std::filesystem::path& path);
/// Creates the missing parents of a path, like make_directory.
void make_parents(const std::filesystem::path& path);

/// rename(2), then fsync of the directory that holds `to`.
void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to);

/// Writes and syncs a new file, in place of a file or symbolic link of this name. Not atomic: for files in a directory
/// that is renamed later.
void write_text(const std::filesystem::path& path, std::string_view text);
/// Replaces a file atomically: temporary file in the same directory, fsync, rename, fsync of the directory. Removes the
/// temporary file if one of them fails.
void write_text_atomically(const std::filesystem::path& path, std::string_view text);

/// The text of a regular file. Throws Error(io) if it is longer than `at_most` bytes.
std::string read_text(const std::filesystem::path& path, std::int64_t at_most);
/// The text of an open file, from its position.
std::string read_text(const Descriptor& file, const std::filesystem::path& path, std::int64_t at_most);

/// Free bytes for this user in the file system of `path`; -1 if unknown.
std::int64_t free_bytes(const std::filesystem::path& path);

}  // namespace weft::storage
