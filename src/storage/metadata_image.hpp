// SPDX-License-Identifier: Apache-2.0
//
// An HDF5 file without its raw data, in memory: HDF5 lays out the file and writes its metadata here, after which other
// code writes the complete file, raw data included, without HDF5. The bytes are those that HDF5 would have written.
//
//   MetadataImage image;
//   Handle file = image.create(path, metadata_bytes);   // create groups, attributes, datasets with their chunks
//   file.close();
//   image.bytes(), image.copy(...)
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <vector>

#include "storage/hdf5.hpp"

namespace weft::storage {

class MetadataImage {
 public:
  MetadataImage() = default;
  MetadataImage(const MetadataImage&) = delete;

  /// Creates a file like `create_file`, with the same layout, but not on disk. `path` is for messages. This must
  /// outlive the handle.
  Handle create(const std::filesystem::path& path, std::int64_t metadata_bytes);

  /// Size of the file, once it is closed.
  std::int64_t bytes() const { return bytes_; }
  /// Copies bytes [begin, end) of the file to `to`: metadata, and zeros in place of raw data. Thread-safe once the file
  /// is closed.
  void copy(std::int64_t begin, std::int64_t end, char* to) const;

 private:
  struct Driver;
  void write(std::int64_t begin, std::int64_t count, const char* from);

  std::map<std::int64_t, std::vector<char>> pages_;  ///< by number; absent ones are zero
  std::int64_t bytes_ = 0;
};

}  // namespace weft::storage
