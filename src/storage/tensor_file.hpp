// SPDX-License-Identifier: Apache-2.0
//
// Typed n-dimensional datasets by rows, in pieces: the form of a checkpoint's shard.
//
// Datasets have chunks of about 1 MiB with a fletcher32 checksum and no time stamps: the same data give the same file.
// Chunks are not cached: every byte of data has left for the operating system when `write_rows` returns, so that a full
// disk shows there; a file that closed without complaint proves nothing (`require_complete` looks). The HDF5 lock is
// held for one piece at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "kernels/array.hpp"
#include "storage/hdf5.hpp"
#include "storage/posix_file.hpp"

namespace weft::storage {

/// Rows of one piece: whole chunks, at most about 4 MiB, so that other threads wait for HDF5 some milliseconds at most.
std::int64_t piece_rows(kernels::Scalar type, const std::vector<std::int64_t>& shape);

/// About what a file needs, beside the data, to describe such a dataset with a few attributes. For `create_file`: all
/// of it then stands together at the file's beginning.
std::int64_t metadata_bytes(kernels::Scalar type, const std::vector<std::int64_t>& shape);

/// Creates `name` (groups between '/' are made). Throws Error(io).
Handle create_dataset(hid_t file, const std::string& name, kernels::Scalar type,
                      const std::vector<std::int64_t>& shape);

/// Bytes [begin, end) of a file.
struct FileRange {
  std::int64_t begin, end;
};

/// Rows [begin, begin + count) from contiguous host memory of the dataset's own type, once. `count` <= piece_rows,
/// `begin` a multiple of it. Returns where the file has their chunks: bytes that are final, whatever else the file
/// gets. Throws Error(io).
std::vector<FileRange> write_rows(hid_t dataset, std::int64_t begin, std::int64_t count, const void* data);

/// Opens `name` after checking that it exists, is of this type and shape and has chunks of a sane size. Throws
/// Error(io).
Handle open_dataset(hid_t file, const std::string& name, kernels::Scalar type, const std::vector<std::int64_t>& shape);

/// Rows [begin, begin + count) into contiguous host memory, in pieces.
void read_rows(hid_t dataset, std::int64_t begin, std::int64_t count, void* data);

/// The same of a file whose bytes have just been verified by their digest: chunks are located through HDF5 and then
/// read straight into place, without its lock and without looking at their checksums again. Datasets in another layout
/// than `create_dataset` makes are read as by `read_rows`.
void read_rows_verified(hid_t dataset, const PosixFile& file, std::int64_t begin, std::int64_t count, void* data);

/// Every chunk of the dataset is in the file: what the file's index says, read back. Throws Error(io).
void require_complete(hid_t dataset, const std::string& name);

}  // namespace weft::storage
