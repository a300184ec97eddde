// SPDX-License-Identifier: Apache-2.0
#include "storage/durable.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.hpp"

namespace weft::storage {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* what) {
  throw error(ExitCode::io, "{}: {} failed ({})", path.string(), what, std::strerror(errno));
}

/// An open file descriptor.
class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags, mode_t mode = 0666)
      : path_(path), descriptor_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {
    if (descriptor_ < 0) fail(path_, "opening");
  }
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  void close() {
    if (::close(std::exchange(descriptor_, -1)) != 0) fail(path_, "closing");
  }
  operator int() const { return descriptor_; }

 private:
  const std::filesystem::path& path_;
  int descriptor_;
};

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

}  // namespace

void sync_file(const std::filesystem::path& path) {
  Descriptor file(path, O_RDONLY);
  if (::fsync(file) != 0) fail(path, "fsync");
  file.close();
}

Writeback::Writeback(const std::filesystem::path& path)
    : path_(path), descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (descriptor_ < 0) fail(path_, "opening");
}

Writeback::~Writeback() { ::close(descriptor_); }

void Writeback::begin(std::int64_t begin, std::int64_t end) const {
  ::sync_file_range(descriptor_, begin, end - begin, SYNC_FILE_RANGE_WRITE);
}

void Writeback::release(std::int64_t begin, std::int64_t end) const {
  constexpr unsigned kAndWait = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  // A write error is reported either here or by the final fsync, not by both.
  if (::sync_file_range(descriptor_, begin, end - begin, kAndWait) != 0 &&
      (errno == EIO || errno == ENOSPC || errno == EDQUOT))
    fail(path_, "writing to the disk");
  ::posix_fadvise(descriptor_, begin, end - begin, POSIX_FADV_DONTNEED);
}

void Writeback::finish() const {
  if (::fsync(descriptor_) != 0) fail(path_, "fsync");
}

void sync_directory(const std::filesystem::path& path) {
  Descriptor directory(path, O_RDONLY | O_DIRECTORY);
  if (::fsync(directory) != 0 && errno != EINVAL) fail(path, "fsync of the directory");
  directory.close();
}

void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail(from, "renaming");
  sync_directory(directory_of(to));
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  Descriptor file(path, O_WRONLY | O_CREAT | O_TRUNC);
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path, "writing");
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  if (::fsync(file) != 0) fail(path, "fsync");
  file.close();
}

void write_text_atomically(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::path temporary = path;
  temporary += ".tmp";
  write_text(temporary, text);
  rename_durably(temporary, path);
}

std::string read_text(const std::filesystem::path& path, std::int64_t at_most) {
  const Descriptor file(path, O_RDONLY);
  struct stat status;
  if (::fstat(file, &status) != 0) fail(path, "reading the size");
  if (!S_ISREG(status.st_mode)) throw error(ExitCode::io, "{}: is not a regular file", path.string());
  if (status.st_size > at_most)
    throw error(ExitCode::io, "{}: has {} bytes (at most {} are accepted)", path.string(), status.st_size, at_most);
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t got = ::read(file, text.data() + filled, text.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path, "reading");
    if (got == 0) break;  // truncated since fstat
    filled += static_cast<std::size_t>(got);
  }
  text.resize(filled);
  return text;
}

std::int64_t free_bytes(const std::filesystem::path& path) {
  std::error_code failed;
  const std::filesystem::space_info space = std::filesystem::space(path, failed);
  return failed ? -1 : static_cast<std::int64_t>(space.available);
}

}  // namespace weft::storage
