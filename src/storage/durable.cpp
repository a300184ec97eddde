// SPDX-License-Identifier: Apache-2.0
#include "storage/durable.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.hpp"

namespace weft::storage {

void sync_file(const std::filesystem::path& path) {
  Descriptor file = open_regular(path);
  if (::fsync(file) != 0) fail_with_errno(path, "fsync");
  if (!file.close()) fail_with_errno(path, "closing");
}

void sync_directory(const std::filesystem::path& path) {
  const Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory < 0) fail_with_errno(path, "opening");
  if (::fsync(directory) != 0 && errno != EINVAL) fail_with_errno(path, "fsync of the directory");
}

namespace {

/// `wanted` or a missing parent of it.
void make_with_parents(const std::filesystem::path& path, const std::filesystem::path& wanted) {
  if (!path.has_relative_path()) return;                                              // "/"
  if (path.filename().empty()) return make_with_parents(path.parent_path(), wanted);  // "runs/a/"
  const std::filesystem::path parent = directory_of(path);
  std::error_code failed;
  if (!std::filesystem::is_directory(path, failed)) {
    if (!std::filesystem::is_directory(parent, failed)) make_with_parents(parent, wanted);
    std::filesystem::create_directory(path, failed);
    if (failed)
      throw error(ExitCode::io, "{}: cannot be created ({}{}); choose another directory", wanted.string(),
                  path == wanted ? "" : path.string() + ": ", failed.message());
  }
  // The parent of an existing directory is synced too: a process may have been killed between the two calls. The parent
  // may not be readable.
  if (::access(parent.c_str(), R_OK) == 0) sync_directory(parent);
}

}  // namespace

void make_directory(const std::filesystem::path& path) { make_with_parents(path, path); }

void make_parents(const std::filesystem::path& path) { make_with_parents(directory_of(path), path); }

void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_with_errno(from, "renaming");
  sync_directory(directory_of(to));
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  Descriptor file = create_own(path);
  write_all(file, text, path);
  if (::fsync(file) != 0) fail_with_errno(path, "fsync");
  if (!file.close()) fail_with_errno(path, "closing");
}

void write_text_atomically(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::path temporary = path;
  temporary += ".tmp";
  try {
    write_text(temporary, text);
    rename_durably(temporary, path);
  } catch (...) {  // the disk may be full: leave nothing on it
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
}

std::string read_text(const std::filesystem::path& path, std::int64_t at_most) {
  return read_text(open_regular(path), path, at_most);
}

std::string read_text(const Descriptor& file, const std::filesystem::path& path, std::int64_t at_most) {
  struct stat status;
  if (::fstat(file, &status) != 0) fail_with_errno(path, "reading the size");
  if (status.st_size > at_most)
    throw error(ExitCode::io, "{}: has {} bytes (at most {} are accepted)", path.string(), status.st_size, at_most);
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t got = ::read(file, text.data() + filled, text.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_with_errno(path, "reading");
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
