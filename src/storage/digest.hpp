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

constexpr std::int64_t kDigestSegment = std::int64_t{64} << 20;

/// 64 lower-case hex digits.
std::string sha256(std::string_view bytes);

/// Segments of a file of `bytes` bytes; an empty file has none.
constexpr std::int64_t digest_segments(std::int64_t bytes) { return (bytes + kDigestSegment - 1) / kDigestSegment; }

/// Digests of segments [begin, end) of the file, by `threads` threads. Throws Error(io) when the file cannot be read or
/// ends before it should (`bytes`: its whole length).
std::vector<std::string> sha256_segments(const std::filesystem::path& path, std::int64_t bytes, std::int64_t begin,
                                         std::int64_t end, int threads);

/// Digests of a file that is still being written: each segment as soon as all its bytes are final, by threads of its own
/// and from what the file then holds, so that little is left to do when the file is complete. Not for several callers
/// at once. Destroyed unfinished it gives up at once.
class FollowingDigests {
 public:
  /// The file must exist. Throws Error(io).
  explicit FollowingDigests(const std::filesystem::path& path);
  FollowingDigests(const FollowingDigests&) = delete;
  ~FollowingDigests();

  /// Bytes [begin, end) have been written and will not change; none may be named twice.
  void add_final(std::int64_t begin, std::int64_t end);

  /// The file is complete, `bytes` long: digests the segments that hold bytes never named final, waits for the rest
  /// and returns all in order. Once. Throws Error(io) as `sha256_segments` does.
  std::vector<std::string> finish(std::int64_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Threads that digest: up to 4, as the machine has cores.
int digest_threads();

}  // namespace weft::storage
