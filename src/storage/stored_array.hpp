// SPDX-License-Identifier: Apache-2.0
//
// One-dimensional datasets that are contiguous and uncompressed, so that they can be mapped into memory or read at the
// offset that the header gives, without HDF5.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/array.hpp"
#include "storage/hdf5.hpp"

namespace weft::storage {

/// Bytes [offset, offset + count * bytes_of(type)) of the file, which are not aligned.
struct StoredArray {
  kernels::Scalar type = kernels::Scalar::u16;
  std::int64_t count = 0;
  std::int64_t offset = 0;
};

/// Opens /`name` of the file at `path`. Throws Error(data) if it is missing or a soft or external link.
Handle open_array(hid_t file, const std::string& path, const std::string& name);

/// The place of /`name`, which must be one-dimensional, contiguous, of one of `types` ("uint16 or uint32" in
/// `types_text`), not empty, and inside a file of `file_bytes`. Throws Error(data) with file and dataset.
StoredArray locate_array(hid_t file, const std::string& path, const std::string& name, std::int64_t file_bytes,
                         std::initializer_list<kernels::Scalar> types, const char* types_text);

/// Writes /`name`, [count]. Throws Error(io).
void write_array(hid_t file, const std::string& path, const char* name, kernels::Scalar type, std::int64_t count,
                 const void* data);

}  // namespace weft::storage
