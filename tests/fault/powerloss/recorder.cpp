// SPDX-License-Identifier: Apache-2.0
//
// A library for LD_PRELOAD that records what a program does to the files below one directory, for the simulation of
// power failures (states.py).
//
//   WEFT_RECORD_ROOT   the directory
//   WEFT_RECORD_LOG    the log; several processes append to it
//
// Record: kind (1 byte), then 6 little-endian int64 (device, inode, offset, bytes, length of a, length of b), then the
// text a, the text b and `bytes` bytes of data. Paths are relative to the root.
//
//   c a           created a regular file (a: path)          d a    created a directory
//   w             wrote data at an offset                   t      truncated or extended to `offset` bytes
//   s             an fsync begins                           S      it has ended: everything before its s is durable
//   r a b         renamed                                   l a b  linked
//   u a           removed a file                            e a    removed a directory
//   m             a write to standard output, as data
//
// A record is appended when the call has returned, except s. Calls of different threads and processes that are ordered
// by synchronisation are therefore recorded in that order. Writes through mapped memory are not recorded.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}
#define ORIGINAL(name, type) static auto* const real = original<type>(name)

struct Recorder {
  std::string root;
  int log = -1;
  Recorder() {
    const char* directory = std::getenv("WEFT_RECORD_ROOT");
    const char* path = std::getenv("WEFT_RECORD_LOG");
    if (directory == nullptr || path == nullptr) return;
    root = directory;
    log = original<int(const char*, int, ...)>("open")(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  }
};
const Recorder& recorder() {
  static const Recorder instance;
  return instance;
}

/// "a/b" for ROOT/a/./b; "." for the root; "" if the path is not below the root.
std::string relative(int directory, const char* path) {
  const std::string& root = recorder().root;
  if (recorder().log < 0 || path == nullptr) return "";
  std::string whole = path;
  if (whole.empty() || whole[0] != '/') {
    char from[4096];
    if (directory == AT_FDCWD) {
      if (::getcwd(from, sizeof from) == nullptr) return "";
    } else {
      const ssize_t n = ::readlink(("/proc/self/fd/" + std::to_string(directory)).c_str(), from, sizeof from - 1);
      if (n < 0) return "";
      from[n] = '\0';
    }
    whole = std::string(from) + "/" + whole;
  }
  std::vector<std::string> parts;
  for (std::size_t at = 0; at < whole.size();) {
    const std::size_t end = std::min(whole.find('/', at), whole.size());
    const std::string part = whole.substr(at, end - at);
    if (part == "..") {
      if (!parts.empty()) parts.pop_back();
    } else if (!part.empty() && part != ".") {
      parts.push_back(part);
    }
    at = end + 1;
  }
  std::string clean;
  for (const std::string& part : parts) clean += "/" + part;
  if (clean == root) return ".";
  return clean.compare(0, root.size() + 1, root + "/") == 0 ? clean.substr(root.size() + 1) : "";
}

void record(char kind, const struct stat& file, std::int64_t offset, const std::string& a, const std::string& b,
            const void* data = nullptr, std::size_t bytes = 0) {
  const std::int64_t numbers[] = {static_cast<std::int64_t>(file.st_dev),
                                  static_cast<std::int64_t>(file.st_ino),
                                  offset,
                                  static_cast<std::int64_t>(bytes),
                                  static_cast<std::int64_t>(a.size()),
                                  static_cast<std::int64_t>(b.size())};
  iovec pieces[] = {{&kind, 1},
                    {const_cast<std::int64_t*>(numbers), sizeof numbers},
                    {const_cast<char*>(a.data()), a.size()},
                    {const_cast<char*>(b.data()), b.size()},
                    {const_cast<void*>(data), bytes}};
  const int before = errno;
  ORIGINAL("writev", ssize_t(int, const iovec*, int));
  const auto whole = static_cast<ssize_t>(1 + sizeof numbers + a.size() + b.size() + bytes);
  if (real(recorder().log, pieces, 5) != whole) {
    std::fputs("recorder: the log cannot be written\n", stderr);
    std::abort();
  }
  errno = before;
}

/// Status of an open file or directory below the root; its path in `path`.
bool below_root(int file, struct stat& status, std::string& path) {
  if (recorder().log < 0 || file < 0) return false;
  char name[4096];
  const ssize_t n = ::readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), name, sizeof name - 1);
  if (n < 0 || name[0] != '/') return false;
  name[n] = '\0';
  path = relative(AT_FDCWD, name);
  return !path.empty() && ::fstat(file, &status) == 0;
}

/// Around every call that may create or truncate a file.
struct Opening {
  std::string path;
  bool existed = false, truncates = false;

  Opening(int directory, const char* name, int flags) {
    if ((flags & (O_CREAT | O_TRUNC)) == 0) return;
    const int before = errno;
    path = relative(directory, name);
    struct stat status;
    existed = !path.empty() && ::fstatat(directory, name, &status, 0) == 0;
    truncates = (flags & O_TRUNC) != 0;
    errno = before;
  }
  int opened(int file) const {
    struct stat status;
    if (path.empty() || file < 0 || ::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) return file;
    if (!existed)
      record('c', status, 0, path, "");
    else if (truncates)
      record('t', status, 0, path, "");
    return file;
  }
};

void wrote(int file, const iovec* pieces, int count, ssize_t n, std::int64_t offset) {
  struct stat status;
  std::string path;
  if (n <= 0 || recorder().log < 0) return;
  const bool message = file == STDOUT_FILENO;
  if (!message && (!below_root(file, status, path) || !S_ISREG(status.st_mode))) return;
  std::string data;
  for (int i = 0; i < count; ++i) data.append(static_cast<const char*>(pieces[i].iov_base), pieces[i].iov_len);
  if (!message && offset < 0) offset = ::lseek(file, 0, SEEK_CUR) - n;
  record(message ? 'm' : 'w', status, offset, "", "", data.data(), static_cast<std::size_t>(n));
}

int synced(int file, int (*real)(int)) {
  struct stat status;
  std::string path;
  const bool ours = below_root(file, status, path);
  if (ours) record('s', status, 0, path, "");
  const int result = real(file);
  if (ours && result == 0) record('S', status, 0, path, "");
  return result;
}

int renamed(int from_directory, const char* from, int to_directory, const char* to, int result) {
  struct stat status;
  const std::string a = relative(from_directory, from), b = relative(to_directory, to);
  if (result == 0 && !a.empty() && !b.empty() && ::fstatat(to_directory, to, &status, AT_SYMLINK_NOFOLLOW) == 0)
    record('r', status, 0, a, b);
  return result;
}

int removed(int directory, const char* path, bool is_directory, int result) {
  const std::string name = relative(directory, path);
  if (result == 0 && !name.empty()) record(is_directory ? 'e' : 'u', {}, 0, name, "");
  return result;
}

int made(int directory, const char* path, int result) {
  struct stat status;
  const std::string name = relative(directory, path);
  if (result == 0 && !name.empty() && ::fstatat(directory, path, &status, 0) == 0) record('d', status, 0, name, "");
  return result;
}

int flags_of(const char* mode) {
  if (mode[0] == 'w') return O_CREAT | O_TRUNC;
  return mode[0] == 'a' ? O_CREAT : 0;
}

}  // namespace

extern "C" {

// The calls with 64 in their names are the same ones here: off_t has 64 bits.
int open(const char* path, int flags, ...) {
  ORIGINAL("open", int(const char*, int, ...));
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  const Opening opening(AT_FDCWD, path, flags);
  return opening.opened(real(path, flags, mode));
}
int open64(const char* path, int flags, ...) __attribute__((alias("open")));
int openat(int directory, const char* path, int flags, ...) {
  ORIGINAL("openat", int(int, const char*, int, ...));
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  const Opening opening(directory, path, flags);
  return opening.opened(real(directory, path, flags, mode));
}
int openat64(int directory, const char* path, int flags, ...) __attribute__((alias("openat")));
FILE* fopen(const char* path, const char* mode) {
  ORIGINAL("fopen", FILE * (const char*, const char*));
  const Opening opening(AT_FDCWD, path, flags_of(mode));
  FILE* const file = real(path, mode);
  if (file != nullptr) opening.opened(::fileno(file));
  return file;
}
FILE* fopen64(const char* path, const char* mode) { return fopen(path, mode); }

ssize_t write(int file, const void* data, std::size_t bytes) {
  ORIGINAL("write", ssize_t(int, const void*, std::size_t));
  const ssize_t n = real(file, data, bytes);
  const iovec piece{const_cast<void*>(data), bytes};
  wrote(file, &piece, 1, n, -1);
  return n;
}
ssize_t writev(int file, const iovec* pieces, int count) {
  ORIGINAL("writev", ssize_t(int, const iovec*, int));
  const ssize_t n = real(file, pieces, count);
  wrote(file, pieces, count, n, -1);
  return n;
}
ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t at) {
  ORIGINAL("pwrite", ssize_t(int, const void*, std::size_t, off_t));
  const ssize_t n = real(file, data, bytes, at);
  const iovec piece{const_cast<void*>(data), bytes};
  wrote(file, &piece, 1, n, at);
  return n;
}
ssize_t pwrite64(int file, const void* data, std::size_t bytes, off64_t at) { return pwrite(file, data, bytes, at); }
ssize_t pwritev(int file, const iovec* pieces, int count, off_t at) {
  ORIGINAL("pwritev", ssize_t(int, const iovec*, int, off_t));
  const ssize_t n = real(file, pieces, count, at);
  wrote(file, pieces, count, n, at);
  return n;
}

int ftruncate(int file, off_t size) {
  ORIGINAL("ftruncate", int(int, off_t));
  const int result = real(file, size);
  struct stat status;
  std::string path;
  if (result == 0 && below_root(file, status, path)) record('t', status, size, path, "");
  return result;
}
int ftruncate64(int file, off64_t size) { return ftruncate(file, size); }
int truncate(const char* path, off_t size) {
  ORIGINAL("truncate", int(const char*, off_t));
  const int result = real(path, size);
  struct stat status;
  const std::string name = relative(AT_FDCWD, path);
  if (result == 0 && !name.empty() && ::stat(path, &status) == 0) record('t', status, size, name, "");
  return result;
}
int truncate64(const char* path, off64_t size) { return truncate(path, size); }

int fallocate(int file, int mode, off_t offset, off_t bytes) {
  ORIGINAL("fallocate", int(int, int, off_t, off_t));
  const int result = real(file, mode, offset, bytes);
  struct stat status;
  std::string path;
  if (result == 0 && below_root(file, status, path)) record('t', status, status.st_size, path, "");
  return result;
}
int fallocate64(int file, int mode, off64_t offset, off64_t bytes) { return fallocate(file, mode, offset, bytes); }
int posix_fallocate(int file, off_t offset, off_t bytes) {
  ORIGINAL("posix_fallocate", int(int, off_t, off_t));
  const int result = real(file, offset, bytes);
  struct stat status;
  std::string path;
  if (result == 0 && below_root(file, status, path)) record('t', status, status.st_size, path, "");
  return result;
}
int posix_fallocate64(int file, off64_t offset, off64_t bytes) { return posix_fallocate(file, offset, bytes); }

int fsync(int file) {
  ORIGINAL("fsync", int(int));
  return synced(file, real);
}
int fdatasync(int file) {
  ORIGINAL("fdatasync", int(int));
  return synced(file, real);
}

int rename(const char* from, const char* to) {
  ORIGINAL("rename", int(const char*, const char*));
  return renamed(AT_FDCWD, from, AT_FDCWD, to, real(from, to));
}
int renameat(int from_directory, const char* from, int to_directory, const char* to) {
  ORIGINAL("renameat", int(int, const char*, int, const char*));
  return renamed(from_directory, from, to_directory, to, real(from_directory, from, to_directory, to));
}
int renameat2(int from_directory, const char* from, int to_directory, const char* to, unsigned flags) {
  ORIGINAL("renameat2", int(int, const char*, int, const char*, unsigned));
  return renamed(from_directory, from, to_directory, to, real(from_directory, from, to_directory, to, flags));
}
int link(const char* from, const char* to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int from_directory, const char* from, int to_directory, const char* to, int flags) {
  ORIGINAL("linkat", int(int, const char*, int, const char*, int));
  const int result = real(from_directory, from, to_directory, to, flags);
  const std::string a = relative(from_directory, from), b = relative(to_directory, to);
  if (result == 0 && !a.empty() && !b.empty()) record('l', {}, 0, a, b);
  return result;
}
int unlink(const char* path) {
  ORIGINAL("unlink", int(const char*));
  return removed(AT_FDCWD, path, false, real(path));
}
int rmdir(const char* path) {
  ORIGINAL("rmdir", int(const char*));
  return removed(AT_FDCWD, path, true, real(path));
}
int unlinkat(int directory, const char* path, int flags) {
  ORIGINAL("unlinkat", int(int, const char*, int));
  return removed(directory, path, (flags & AT_REMOVEDIR) != 0, real(directory, path, flags));
}
int remove(const char* path) {
  ORIGINAL("remove", int(const char*));
  struct stat status;
  const bool is_directory = ::lstat(path, &status) == 0 && S_ISDIR(status.st_mode);
  return removed(AT_FDCWD, path, is_directory, real(path));
}
int mkdir(const char* path, mode_t mode) {
  ORIGINAL("mkdir", int(const char*, mode_t));
  return made(AT_FDCWD, path, real(path, mode));
}
int mkdirat(int directory, const char* path, mode_t mode) {
  ORIGINAL("mkdirat", int(int, const char*, mode_t));
  return made(directory, path, real(directory, path, mode));
}

}  // extern "C"
