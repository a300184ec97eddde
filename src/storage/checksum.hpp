// SPDX-License-Identifier: Apache-2.0
//
// Checksum of the fletcher32 filter of HDF5. Several times faster than the filter, and computed outside the HDF5 lock.
// The filter verifies it when chunks are read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft::storage {

/// The checksum that the filter appends, in little-endian order, to the `bytes` bytes at `data`.
std::uint32_t fletcher32(const void* data, std::size_t bytes);

}  // namespace weft::storage
