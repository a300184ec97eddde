// SPDX-License-Identifier: Apache-2.0
//
// A file whose digests were verified, read again. A disk or another program can change bytes after the verification:
// every block that is read is compared with the tag that was computed while the digests were, so that the bytes used
// are the bytes verified.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "storage/digest.hpp"
#include "storage/hdf5.hpp"

namespace weft::storage {

class VerifiedFile {
 public:
  /// `tags`: the tags of all blocks of the file (`sha256_segments`).
  VerifiedFile(std::filesystem::path path, std::int64_t bytes, std::vector<BlockTag> tags);

  /// Bytes [begin, begin + bytes) of the file, and where to put them.
  struct Part {
    std::int64_t begin, bytes;
    void* to;
  };
  /// Reads the parts, given in ascending order of `begin`, by several threads. Reads that fail are repeated
  /// (storage/retry.hpp). Throws Error(io) if the file cannot be read or has changed.
  void read(std::span<const Part> parts) const;

  /// Opens the file with HDF5, which reads a copy in memory: at least the first `leading` bytes, and zeros after them.
  /// Throws Error(io).
  Handle open_hdf5(std::int64_t leading) const;

  std::int64_t bytes() const { return bytes_; }

 private:
  std::filesystem::path path_;
  std::int64_t bytes_;
  std::vector<BlockTag> tags_;
};

}  // namespace weft::storage
