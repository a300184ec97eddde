// SPDX-License-Identifier: Apache-2.0
//
// HDF5's checksum of a chunk, formed by us: several times faster than in its filter, and outside its lock. The filter
// checks it in every ordinary read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft::storage {

/// What HDF5's fletcher32 filter stores, in little-endian order, behind the `bytes` bytes at `data`.
std::uint32_t fletcher32(const void* data, std::size_t bytes);

}  // namespace weft::storage
