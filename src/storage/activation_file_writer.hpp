// SPDX-License-Identifier: Apache-2.0
//
// Writes one activation file of Weft's own format (activation_file.hpp), in HDF5.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "kernels/array.hpp"
#include "storage/hdf5.hpp"

namespace weft::storage {

class ActivationFileWriter {
 public:
  struct Shape {
    std::int64_t n_layers = 0;
    std::int64_t d_model = 0;
    kernels::Scalar type = kernels::Scalar::bf16;
    std::int64_t chunk_rows = 1024;
    int gzip_level = 0;  ///< 0 = not compressed
    /// Rows of the whole file: each matrix is then one piece of it, and rows of several files are written at the same
    /// time by as many threads. 0: not known; matrices grow by chunks, through HDF5, which one thread enters at a time.
    std::int64_t rows = 0;
  };
  /// `attributes` are written as string attributes of the root group. Never overwrites. Throws Error(io).
  ActivationFileWriter(const std::filesystem::path& path, const Shape& shape, std::int64_t format_version,
                       const std::map<std::string, std::string>& attributes);

  /// Appends rows: inputs and targets [rows, n_layers * d_model] as stored. Throws Error(io).
  void append(std::int64_t rows, const std::byte* inputs, const std::byte* targets);
  /// Token ids of all rows, and the rows at which documents begin: ascending, the first is 0. positions: of each row in
  /// the text segment that the model processed; empty: not written. Once, before `close`.
  void write_tokens(std::span<const std::int32_t> ids, std::span<const std::int64_t> documents,
                    std::span<const std::int32_t> positions = {});
  /// Must be called: reports errors that occur on closing.
  void close();

 private:
  void place_matrices();
  void append_in_place(std::int64_t rows, const std::byte* inputs, const std::byte* targets) const;
  void append_chunks(std::int64_t rows, const std::byte* inputs, const std::byte* targets);

  std::string path_;
  Shape shape_;
  std::int64_t rows_ = 0;
  Handle file_, type_;
  std::vector<Handle> datasets_;          // [side][layer]
  Descriptor plain_;                      // the file without HDF5, where rows are written in place
  std::vector<std::int64_t> begin_ = {};  // likewise: byte at which each of datasets_ begins
};

}  // namespace weft::storage
