// SPDX-License-Identifier: Apache-2.0
//
// Unpacked chunks of compressed datasets. A compressed chunk is unpacked as a whole: without keeping it, a reader of
// blocks of 256 rows unpacks a chunk of 40,000 rows 157 times.
//
// A band is the same rows of one file in all its datasets. When memory is short, chunks of other bands are removed
// first, the least recently used one before others; a chunk that then does not fit is not kept. So a pass in stored
// order unpacks most chunks once, also if a band is larger than the memory.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "dataset/activations/description.hpp"

namespace weft::dataset {

/// Bytes of unpacked chunks that a reader keeps: one band, at least 256 MiB and at most 4 GiB.
std::int64_t bytes_kept_unpacked(const Description&);

class UnpackedChunks {
 public:
  struct Key {
    std::int64_t file = 0, row_begin = 0;  ///< the band
    std::int64_t dataset = 0;              ///< number of the dataset in the file
    auto operator<=>(const Key&) const = default;
  };

  explicit UnpackedChunks(std::int64_t most_bytes) : most_(most_bytes) {}

  /// The chunk, or null if it is not kept. Valid until the next call of `insert`.
  const std::byte* find(const Key&);
  /// Memory to unpack a chunk into, or null if there is no room for it. The chunk must be removed if it is not filled.
  std::byte* insert(const Key&, std::int64_t bytes);
  void remove(const Key&);

  std::int64_t bytes() const { return bytes_; }

 private:
  struct Chunk {
    std::vector<std::byte> values;
    std::int64_t used = 0;  // the time of the last use
  };
  std::map<Key, Chunk> chunks_;
  std::int64_t most_, bytes_ = 0, now_ = 0;
};

}  // namespace weft::dataset
