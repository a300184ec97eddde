// SPDX-License-Identifier: Apache-2.0
//
// sha256 of texts and of large files. A file is digested in segments of 64 MiB, several at a time: `dd bs=64M skip=i
// count=1 if=FILE | sha256sum` repeats segment i by hand, and for a file of one segment it is sha256sum's own answer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace weft::storage {

class Writeback;

constexpr std::int64_t kDigestSegment = std::int64_t{64} << 20;

/// 64 lower-case hex digits.
std::string sha256(std::string_view bytes);

/// Segments of a file of `bytes` bytes; an empty file has none.
constexpr std::int64_t digest_segments(std::int64_t bytes) { return (bytes + kDigestSegment - 1) / kDigestSegment; }

/// Digests of segments [begin, end) of the file, by `threads` threads. Throws Error(io) when the file cannot be read or
/// ends before it should (`bytes`: its whole length).
std::vector<std::string> sha256_segments(const std::filesystem::path& path, std::int64_t bytes, std::int64_t begin,
                                         std::int64_t end, int threads);

/// Digests of a file that is still being written: each segment as soon as all its bytes are final, from what the file
/// then holds and by threads of its own, so that little is left to do when the file is complete. A digested segment is
/// sent to the disk and leaves the page cache. Not for several callers at once. Destroyed unfinished it gives up at
/// once.
class FollowingDigests {
 public:
  /// The file must exist; `disk` is of the same file and outlives this. Throws Error(io).
  FollowingDigests(const std::filesystem::path& path, const Writeback& disk);
  FollowingDigests(const FollowingDigests&) = delete;
  ~FollowingDigests();

  /// Bytes [begin, end) have been written and will not change; none may be named twice. Digests a segment itself when
  /// the threads lag behind. Throws Error(io): the file cannot be read, or the disk did not take what was written.
  void add_final(std::int64_t begin, std::int64_t end);

  /// The file is complete, `bytes` long: digests the segments that hold bytes never named final, waits for the rest
  /// and returns all in order. Once. Throws Error(io) as `add_final` does.
  std::vector<std::string> finish(std::int64_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Threads that digest: up to 4, as the machine has cores.
int digest_threads();

}  // namespace weft::storage
