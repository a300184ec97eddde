// SPDX-License-Identifier: Apache-2.0
//
// Typed n-dimensional datasets, written and read in pieces of rows: the format of checkpoint shards.
//
// Datasets have chunks of about 1 MiB with a fletcher32 checksum and no time stamps: files of the same data are
// identical. Chunks are not cached: all bytes were passed to the operating system when `write_rows` returns, so that it
// reports a full disk. HDF5 may close an incomplete file without an error; `require_complete` detects that. The HDF5
// lock is held for one piece at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "kernels/array.hpp"
#include "storage/hdf5.hpp"
#include "storage/verified_file.hpp"

namespace weft::storage {

/// Rows of one piece: complete chunks, about 4 MiB, so that other threads wait for HDF5 at most a few milliseconds.
std::int64_t piece_rows(kernels::Scalar type, const std::vector<std::int64_t>& shape);

/// Approximate bytes of metadata of such a dataset with a few attributes. The sum over all datasets is the parameter of
/// `create_file` that places all metadata at the start of the file.
std::int64_t metadata_bytes(kernels::Scalar type, const std::vector<std::int64_t>& shape);

/// Creates `name` and the groups of its path. Throws Error(io).
Handle create_dataset(hid_t file, const std::string& name, kernels::Scalar type,
                      const std::vector<std::int64_t>& shape);

/// Writes rows [begin, begin + count), once each, from contiguous host memory of the dataset's type. `begin` is a
/// multiple of piece_rows, `count` at most piece_rows. Throws Error(io).
void write_rows(hid_t dataset, std::int64_t begin, std::int64_t count, const void* data);

/// Creates `name` and writes all its rows. Throws Error(io).
void write_tensor(hid_t file, const std::string& name, kernels::Scalar type, const std::vector<std::int64_t>& shape,
                  const void* data);

/// The place of a chunk: bytes [begin, begin + used) of the tensor are at byte `at` of the file. Zeros and the
/// fletcher32 checksum (4 bytes) of both follow, `stored` bytes in all.
struct StoredChunk {
  std::int64_t begin, used, at, stored;

  std::int64_t end() const { return at + stored; }
};
constexpr std::int64_t kChunkSumBytes = 4;

/// Allocates all chunks of a new dataset of a MetadataImage and returns their places, in the order of the tensor.
/// Throws Error(io).
std::vector<StoredChunk> allocate_chunks(hid_t dataset);

/// Opens `name`. Throws Error(io) if it does not exist, is reached through a soft or external link, has another type or
/// shape, or chunks above 64 MiB.
Handle open_dataset(hid_t file, const std::string& name, kernels::Scalar type, const std::vector<std::int64_t>& shape);

/// Reads rows [begin, begin + count) into contiguous host memory, in pieces.
void read_rows(hid_t dataset, std::int64_t begin, std::int64_t count, void* data);

/// The places of these rows in the file, in ascending order: for reading them without HDF5. Throws Error(io) for
/// layouts other than that of `create_dataset`.
std::vector<VerifiedFile::Part> locate_rows(hid_t dataset, std::int64_t begin, std::int64_t count, void* data);

/// Throws Error(io) unless the index of the file lists every chunk of the dataset.
void require_complete(hid_t dataset, const std::string& name);

}  // namespace weft::storage
