// SPDX-License-Identifier: Apache-2.0
//
// Checksum of the fletcher32 filter of HDF5. Several times faster than the filter, and computed outside the HDF5 lock.
// The filter verifies it when chunks are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace weft::storage {

/// The checksum of bytes that are added piece by piece.
class Fletcher32 {
 public:
  void add(const void* data, std::size_t bytes);
  /// The checksum that the filter appends, in little-endian order, to all bytes so far.
  std::uint32_t value() const;

 private:
  void append(std::uint64_t words, std::uint64_t plain, std::uint64_t weighted);
  void append_rows(const unsigned char* data, std::size_t depth);

  std::uint64_t plain_ = 0, weighted_ = 0;
  std::optional<unsigned char> half_;  ///< first byte of a word of which the second one is missing
};

/// The checksum of the `bytes` bytes at `data`.
std::uint32_t fletcher32(const void* data, std::size_t bytes);

}  // namespace weft::storage
