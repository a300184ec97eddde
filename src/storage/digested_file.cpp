// SPDX-License-Identifier: Apache-2.0
#include "storage/digested_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "storage/digest.hpp"
#include "storage/threads.hpp"

namespace weft::storage {
namespace {

/// Bytes of one write. Smaller ones leave the disk idle between two of them.
constexpr std::int64_t kPiece = std::int64_t{4} << 20;
/// Bytes that are produced and digested at a time: source and target fit in the L2 cache.
constexpr std::int64_t kBlock = std::int64_t{128} << 10;
/// Alignment of direct writes in memory and in the file: a page, which is a multiple of the sectors of common disks.
constexpr std::int64_t kAlignment = 4096;

static_assert(kDigestSegment % kPiece == 0 && kPiece % kBlock == 0 && kBlock % kAlignment == 0);

bool is_unsupported(int number) { return number == EINVAL || number == EOPNOTSUPP || number == ENOSYS; }

/// Reserves the space, so that writes of several threads do not extend the file, which file systems serialise.
void reserve(const Descriptor& file, std::int64_t bytes, const std::filesystem::path& path) {
  if (bytes == 0) return;
  int result;
  do result = ::fallocate(file, 0, 0, bytes);
  while (result != 0 && errno == EINTR);
  if (result != 0 && is_unsupported(errno)) result = ::ftruncate(file, bytes);
  if (result != 0) fail_with_errno(path, fmt::format("reserving {} bytes", bytes).c_str());
}

/// The file, opened for direct writes; not open if the file system does not support them.
Descriptor open_direct(const std::filesystem::path& path) {
  try {
    return open_own(path, O_WRONLY | O_DIRECT);
  } catch (const SystemError& failure) {
    if (is_unsupported(failure.number())) return {};
    throw;
  }
}

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

}  // namespace

DigestedFile::DigestedFile(std::filesystem::path path, std::int64_t bytes, Cache cache, Access access)
    : path_(std::move(path)), bytes_(bytes), file_(create_own(path_, access)) {
  reserve(file_, bytes, path_);
  if (cache == Cache::avoid) direct_ = open_direct(path_);
  is_direct_ = direct_ >= 0;
}

std::vector<std::string> DigestedFile::write(int threads, const std::function<Source()>& source_of_segment) {
  const std::int64_t n_segments = digest_segments(bytes_);
  std::vector<std::string> digests(static_cast<std::size_t>(n_segments));
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> cancelled{false};
  in_parallel(std::min<std::int64_t>(threads, n_segments), [&] {
    try {
      const std::unique_ptr<char, Free> buffer(static_cast<char*>(std::aligned_alloc(kAlignment, kPiece)));
      if (!buffer) throw std::bad_alloc();
      for (std::int64_t i = next++; i < n_segments && !cancelled; i = next++)
        digests[static_cast<std::size_t>(i)] =
            write_segment(i * kDigestSegment, std::min(bytes_, (i + 1) * kDigestSegment), source_of_segment(),
                          buffer.get(), cancelled);
    } catch (...) {
      cancelled = true;
      throw;
    }
  });
  return digests;
}

std::string DigestedFile::write_segment(std::int64_t begin, std::int64_t end, const Source& source, char* buffer,
                                        const std::atomic<bool>& cancelled) {
  Sha256 sha256;
  for (std::int64_t at = begin; at < end && !cancelled;) {
    const std::int64_t piece_end = std::min(end, at + kPiece);
    for (std::int64_t block = at; block < piece_end; block += kBlock) {
      const std::int64_t block_end = std::min(piece_end, block + kBlock);
      char* const to = buffer + (block - at);
      source(block, block_end, to);
      sha256.add(to, static_cast<std::size_t>(block_end - block));
    }
    put(buffer, at, piece_end);
    note_progress();
    at = piece_end;
  }
  if (!is_direct_) {
    constexpr unsigned kAndWait = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    // A write error is reported either here or by the final fsync, not by both.
    if (::sync_file_range(file_, begin, end - begin, kAndWait) != 0 &&
        (errno == EIO || errno == ENOSPC || errno == EDQUOT))
      fail_with_errno(path_, "writing to the disk");
    ::posix_fadvise(file_, begin, end - begin, POSIX_FADV_DONTNEED);
  }
  return sha256.hex();
}

void DigestedFile::put(const char* from, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = begin;
  while (begin < end) {
    // The end of the file may be a part of a page: only that is written through the page cache.
    const std::int64_t pages = (end - begin) / kAlignment * kAlignment;
    const bool direct = is_direct_ && pages > 0 && begin % kAlignment == 0;
    const ssize_t done =
        ::pwrite(direct ? direct_ : file_, from, static_cast<std::size_t>(direct ? pages : end - begin), begin);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && direct && errno == EINVAL) {  // the file system needs another alignment
      is_direct_ = false;
      continue;
    }
    if (done < 0) fail_with_errno(path_, fmt::format("writing at byte {}", begin).c_str());
    begin += done;
    from += done;
  }
  if (!is_direct_) ::sync_file_range(file_, first, end - first, SYNC_FILE_RANGE_WRITE);  // a hint: start now
}

void DigestedFile::sync() const {
  if (::fsync(file_) != 0) fail_with_errno(path_, "fsync");
}

}  // namespace weft::storage
