// SPDX-License-Identifier: Apache-2.0
//
// A new file of known size, produced, digested and written in segments of 64 MiB (storage/digest.hpp) by several
// threads. The bytes that are digested are those that are passed to the operating system: each piece is produced in a
// buffer, in blocks that are digested while they are in the cache of the processor, and written from there.
//
// The space is reserved first, so that a full disk is reported before anything is written. Pieces are written past the
// page cache (O_DIRECT) where the file system supports it: no copy, no pages to allocate, and the cache keeps other
// data, such as the training set. Elsewhere each segment is flushed and dropped from the page cache when it has been
// written.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/file.hpp"

namespace weft::storage {

class DigestedFile {
 public:
  /// Stores bytes [begin, end) of the file at `to`.
  using Source = std::function<void(std::int64_t begin, std::int64_t end, char* to)>;
  enum class Cache { avoid, use };

  /// Creates the file in place of a file or symbolic link of this name, and reserves its space. Throws Error(io).
  DigestedFile(std::filesystem::path path, std::int64_t bytes, Cache cache = Cache::avoid,
               Access access = Access::usual);

  /// Writes the file by `threads` threads, this one among them, with about 4 MiB of memory each. Every segment has a
  /// separate Source, which is called by one thread, in the order of the file; with one thread the segments follow in
  /// order as well. Returns the sha256 of the segments. Throws the first error of any thread: Error(io) if writing
  /// fails, or that of a Source. To be called once.
  std::vector<std::string> write(int threads, const std::function<Source()>& source_of_segment);
  /// fsync. The descriptor is the one of the writes: Linux reports a write error once, to descriptors open at that
  /// time.
  void sync() const;

  /// False if the file was written through the page cache.
  bool is_direct() const { return is_direct_; }

 private:
  std::string write_segment(std::int64_t begin, std::int64_t end, const Source& source, char* buffer,
                            const std::atomic<bool>& cancelled);
  void put(const char* from, std::int64_t begin, std::int64_t end);

  std::filesystem::path path_;
  std::int64_t bytes_;
  Descriptor file_, direct_;
  std::atomic<bool> is_direct_{false};
};

/// Threads for a DigestedFile. They compute and wait for the disk in turn; if other work keeps all cores busy, their
/// number decides the share of the file.
constexpr int kWritingThreads = 8;

}  // namespace weft::storage
