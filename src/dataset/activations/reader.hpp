// SPDX-License-Identifier: Apache-2.0
//
// Reads raw rows from activation files, bit for bit as stored, without conversion.
//
// Uncompressed datasets are located once through HDF5 and then read with preadv by several threads, outside the HDF5
// lock, directly into interleaved rows. Compressed datasets are read through HDF5; each chunk is unpacked once per
// call.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dataset/activations/description.hpp"
#include "dataset/activations/workers.hpp"

namespace weft::dataset {

/// Rows [row_begin, row_begin + rows) of a file and their destination: [rows, row_bytes] each.
struct RowRead {
  std::int64_t file = 0;
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::byte* inputs = nullptr;   ///< null: skip
  std::byte* targets = nullptr;  ///< null: skip
};

class Reader {
 public:
  Reader(const Description&, int n_threads);
  ~Reader();

  /// Throws Error(data) with the file if it cannot be read or has changed since it was described.
  void read(std::span<const RowRead>);
  /// The same as jobs for `workers`, which may run in any order and concurrently with other jobs. Opens the files and
  /// may throw like `read`; so may the jobs. Jobs own what they use, except this Reader.
  std::vector<Job> jobs(std::span<const RowRead>);

  /// Its threads, for `jobs` and for loops over the rows. Must not be used while `read` runs.
  Workers& workers();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Index of the first raw value that is not finite, or -1.
std::int64_t first_non_finite(kernels::Scalar type, const std::byte* values, std::int64_t n);

/// Reads the given rows again and locates the first value that is not finite: "DIR/chunk_0.hdf5: /layer_3/inputs row
/// 17, column 5 is not finite"; "" if all are finite. For the message after a non-finite loss.
std::string find_non_finite(const Description&, std::int64_t file, std::int64_t row_begin, std::int64_t row_end);

}  // namespace weft::dataset
