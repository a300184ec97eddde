// SPDX-License-Identifier: Apache-2.0
//
// Opens files safely. Files that are read may be reached through symbolic links, but must be regular files:
// opening a FIFO waits for a writer. Files that a run writes are opened relative to their directory and never through
// a symbolic link, which another user may have placed there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/error.hpp"

namespace weft {

/// A failed system call: an Error that keeps errno.
class SystemError : public Error {
 public:
  SystemError(ExitCode code, int number, std::string message) : Error(code, std::move(message)), number_(number) {}
  int number() const { return number_; }

 private:
  int number_;
};

/// An open file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  Descriptor(Descriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Descriptor() { close(); }
  /// False, with errno, if closing fails: some file systems report write errors only then.
  bool close();
  operator int() const { return descriptor_; }  // -1: none

 private:
  int descriptor_ = -1;
};

/// Opens a regular file for reading. Follows symbolic links. Throws Error(code) without waiting if the path is anything
/// else: "PATH: is a FIFO (only regular files are read)"; SystemError(code) if it cannot be opened.
Descriptor open_regular(const std::filesystem::path& path, ExitCode code = ExitCode::io);

/// Opens or creates a file to write, with these flags of open(2) (O_WRONLY | O_APPEND, …) and relative to a handle of
/// its directory. Throws Error(io), also if the path is a symbolic link.
Descriptor open_own(const std::filesystem::path& path, int flags);

/// Who may read and write a new file: the users that the umask of the process allows, or its owner alone.
enum class Access { usual, owner };

/// Creates a file to write in place of a file or symbolic link of this name. Throws Error(io).
Descriptor create_own(const std::filesystem::path& path, Access access = Access::usual);

/// Writes the whole text at the position of the file. Throws Error(io) that names `path`.
void write_all(const Descriptor& file, std::string_view text, const std::filesystem::path& path);
/// Writes `bytes` bytes at `offset`, from any thread. Throws Error(io) that names `path`.
void write_at(const Descriptor& file, const void* from, std::int64_t bytes, std::int64_t offset,
              const std::filesystem::path& path);

/// Throws SystemError(io) "PATH: WHAT failed (…)" with the text of errno.
[[noreturn]] void fail_with_errno(const std::filesystem::path& path, const char* what);

/// The directory of a path: "." if it has none.
std::filesystem::path directory_of(const std::filesystem::path& path);

}  // namespace weft
