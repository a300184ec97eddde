// SPDX-License-Identifier: Apache-2.0
//
// sha256 of texts and of large files. A file is digested in segments of 64 MiB, several at a time. `dd bs=64M skip=i
// count=1 if=FILE | sha256sum` gives the digest of segment i; for a file of one segment it equals `sha256sum FILE`.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

struct evp_md_ctx_st;

namespace weft::storage {

constexpr std::int64_t kDigestSegment = std::int64_t{64} << 20;

/// Incremental sha256.
class Sha256 {
 public:
  Sha256();
  void add(const void* data, std::size_t bytes);
  /// 64 lower-case hex digits. To be called once.
  std::string hex();

 private:
  std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context_;
};

/// 64 lower-case hex digits.
std::string sha256(std::string_view bytes);

/// Number of segments of a file of `bytes` bytes; 0 for an empty file.
constexpr std::int64_t digest_segments(std::int64_t bytes) { return (bytes + kDigestSegment - 1) / kDigestSegment; }

/// Tags recognise blocks of 1 MiB when they are read again in the same process: GMAC of AES-128 with a constant key.
/// Several times faster than sha256; never stored. See storage/verified_file.hpp.
using BlockTag = std::array<unsigned char, 16>;
constexpr std::int64_t kTagBlock = std::int64_t{1} << 20;
constexpr std::int64_t tagged_blocks(std::int64_t bytes) { return (bytes + kTagBlock - 1) / kTagBlock; }
BlockTag tag_of(const void* data, std::int64_t bytes);

/// Digests of segments [begin, end) of a file of `bytes` bytes, computed by `threads` threads. Appends the tags of
/// their blocks to `tags`, if given. Reads that fail are repeated (storage/retry.hpp). Throws SystemError if the file
/// cannot be read, and Error(io) if it is shorter.
std::vector<std::string> sha256_segments(const std::filesystem::path& path, std::int64_t bytes, std::int64_t begin,
                                         std::int64_t end, int threads, std::vector<BlockTag>* tags = nullptr);

/// Number of threads for digests: that of the cores, at most 4.
int digest_threads();

}  // namespace weft::storage
