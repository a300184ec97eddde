// SPDX-License-Identifier: Apache-2.0
#include "storage/posix_file.hpp"

#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"

namespace weft::storage {

PosixFile::PosixFile(const std::string& path) : path_(path), descriptor_(open_regular(path)) {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail_with_errno(path, "reading the size");
  bytes_ = status.st_size;
}

void PosixFile::read(void* to, std::int64_t bytes, std::int64_t offset) const {
  iovec piece{to, static_cast<std::size_t>(bytes)};
  read(std::span(&piece, 1), offset);
}

void PosixFile::read(std::span<iovec> pieces, std::int64_t offset) const {
  while (!pieces.empty()) {
    if (pieces.front().iov_len == 0) {
      pieces = pieces.subspan(1);
      continue;
    }
    const ssize_t got =
        ::preadv(descriptor_, pieces.data(), static_cast<int>(std::min<std::size_t>(pieces.size(), IOV_MAX)), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw error(ExitCode::io, "{}: reading at byte {} failed ({})", path_, offset, std::strerror(errno));
    if (got == 0)
      throw error(ExitCode::data, "{}: ends at byte {} (it was longer when it was opened); was it changed?", path_,
                  offset);
    offset += got;
    std::size_t left = static_cast<std::size_t>(got);
    while (left > 0) {
      iovec& piece = pieces.front();
      const std::size_t used = std::min(left, piece.iov_len);
      piece.iov_base = static_cast<char*>(piece.iov_base) + used;
      piece.iov_len -= used;
      left -= used;
      if (piece.iov_len == 0) pieces = pieces.subspan(1);
    }
  }
}

}  // namespace weft::storage
