// SPDX-License-Identifier: Apache-2.0
//
// Raw rows out of activation files, bit for bit as stored; nothing is converted.
//
// Uncompressed datasets are located once through HDF5 and then read with preadv by several threads, outside the HDF5
// lock, straight into interleaved rows. Compressed ones go through HDF5, each HDF5 chunk unpacked once per call.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dataset/activations/description.hpp"
#include "dataset/activations/workers.hpp"

namespace weft::dataset {

/// Rows [row_begin, row_begin + rows) of a file and where they go: [rows, row_bytes] each.
struct RowRead {
  std::int64_t file = 0;
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::byte* inputs = nullptr;   ///< null: not wanted
  std::byte* targets = nullptr;  ///< null: not wanted
};

class Reader {
 public:
  Reader(const Description&, int n_threads);
  ~Reader();

  /// Throws Error(data) naming file and dataset for what cannot be read or has changed since it was described.
  void read(std::span<const RowRead>);
  /// The same as jobs for `workers`, to be done in any order beside others. Opens the files and may throw like `read`;
  /// so may the jobs. What one of them needs lives as long as it does.
  std::vector<Job> jobs(std::span<const RowRead>);

  /// Its threads, for `jobs` and for passes over what was read. Not while `read` runs.
  Workers& workers();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The first value among raw ones that is not finite: its index, or -1.
std::int64_t first_non_finite(kernels::Scalar type, const std::byte* values, std::int64_t n);

/// Reads the given rows again and says where the first value that is not finite stands: "DIR/chunk_0.hdf5:
/// /layer_3/inputs row 17, column 5 is not finite"; "" when all are finite. For the message after a non-finite loss.
std::string find_non_finite(const Description&, std::int64_t file, std::int64_t row_begin, std::int64_t row_end);

}  // namespace weft::dataset
