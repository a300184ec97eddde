// SPDX-License-Identifier: Apache-2.0
#include "base/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/fault.hpp"

namespace weft {
namespace {

// Not following links and not waiting have no effect on regular files.
constexpr int kOwn = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

/// The directory of a file.
Descriptor open_directory(const std::filesystem::path& path) {
  Descriptor directory(::open(directory_of(path).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (directory < 0) fail_with_errno(path, "opening");
  return directory;
}

Descriptor open_in(int directory, const std::filesystem::path& path, int flags, mode_t mode = 0666) {
  Descriptor file(::openat(directory, path.filename().c_str(), flags | kOwn, mode));
  if (file < 0 && errno == ELOOP)
    throw error(ExitCode::io, "{}: is a symbolic link (a run does not write through links); remove it", path.string());
  if (file < 0) fail_with_errno(path, "opening");
  return file;
}

}  // namespace

bool Descriptor::close() { return descriptor_ < 0 || ::close(std::exchange(descriptor_, -1)) == 0; }

void fail_with_errno(const std::filesystem::path& path, const char* what) {
  const int number = errno;
  throw SystemError(ExitCode::io, number,
                    fmt::format("{}: {} failed ({})", path.string(), what, std::strerror(number)));
}

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

Descriptor open_regular(const std::filesystem::path& path, ExitCode code) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  // A socket cannot be opened at all (ENXIO).
  if (file < 0 && errno == ENXIO && ::stat(path.c_str(), &status) == 0)
    throw error(code, "{}: is {} (only regular files are read)", path.string(), kind_of(status.st_mode));
  if (file < 0 || ::fstat(file, &status) != 0) {
    const int number = errno;
    throw SystemError(code, number, fmt::format("{}: cannot be read ({})", path.string(), std::strerror(number)));
  }
  if (!S_ISREG(status.st_mode))
    throw error(code, "{}: is {} (only regular files are read)", path.string(), kind_of(status.st_mode));
  fault::point("input-open");
  return file;
}

Descriptor open_own(const std::filesystem::path& path, int flags) { return open_in(open_directory(path), path, flags); }

Descriptor create_own(const std::filesystem::path& path, Access access) {
  const Descriptor directory = open_directory(path);
  if (::unlinkat(directory, path.filename().c_str(), 0) != 0 && errno != ENOENT) fail_with_errno(path, "replacing");
  Descriptor file = open_in(directory, path, O_WRONLY | O_CREAT | O_EXCL, access == Access::owner ? 0600 : 0666);
  fault::point("output-open");
  return file;
}

void write_all(const Descriptor& file, std::string_view text, const std::filesystem::path& path) {
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_with_errno(path, "writing");
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void write_at(const Descriptor& file, const void* from, std::int64_t bytes, std::int64_t offset,
              const std::filesystem::path& path) {
  for (const char* next = static_cast<const char*>(from); bytes > 0;) {
    const ssize_t written = ::pwrite(file, next, static_cast<std::size_t>(bytes), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_with_errno(path, fmt::format("writing at byte {}", offset).c_str());
    next += written;
    offset += written;
    bytes -= written;
  }
}

}  // namespace weft
