// SPDX-License-Identifier: Apache-2.0
//
// Reads raw rows from activation files, bit for bit as stored, without conversion.
//
// Uncompressed datasets are located once through HDF5 and then read with preadv by several threads, outside the HDF5
// lock, directly into interleaved rows. Compressed datasets are read through HDF5; unpacked chunks
// are kept in bounded memory (unpacked_chunks.hpp). Rows of a dataset with a source (row_source.hpp) are computed by
// the calling thread instead.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dataset/activations/description.hpp"
#include "dataset/activations/order.hpp"
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

  /// Throws Error(data) with the file if it cannot be read, or if it is not the file that was described
  /// (require_described, row_sample.hpp).
  void read(std::span<const RowRead>);
  /// The work of `read` as jobs for `workers`, which may run in any order and concurrently with other jobs. Opens the
  /// files and may throw like `read`; so may the jobs. Jobs own what they use, except this Reader. There are none for a
  /// source, which has begun to fill the rows when this returns, and has filled them after `finish_source`.
  std::vector<Job> jobs(std::span<const RowRead>);
  /// Does nothing without a source. Throws like `read`.
  void finish_source();
  /// Waits until a source writes to no destination of this rank; does nothing without one.
  void wait_for_source();

  /// The threads of this Reader, for `jobs` and for loops over the rows. Must not be used while `read` runs.
  Workers& workers();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// To be called on every rank after reads whose number differs between ranks (RowSource::conclude). Collective.
void conclude_reads(const Description&);

/// Index of the first raw value that is not finite, or -1.
std::int64_t first_non_finite(kernels::Scalar type, const std::byte* values, std::int64_t n);

/// The first value that is not finite, as the messages of all commands name it: "DIR/chunk_0.hdf5: /layer_3/inputs row
/// 17, column 5 is not finite". `at` counts values of the inputs, or of the targets, from row `row_begin` of the file.
std::string non_finite_text(const Description&, std::int64_t file, std::int64_t row_begin, bool target,
                            std::int64_t at);

/// The first value that is not finite among rows that were read, as above; "" if all are finite. The lowest row comes
/// first, inputs before targets.
std::string non_finite_text(const Description&, const RowRead&);

/// Reads the given rows again and locates the first value that is not finite (non_finite_text); "" if all are finite.
/// The ranges are in stored order.
std::string find_non_finite(const Description&, std::span<const RowRange>);

}  // namespace weft::dataset
