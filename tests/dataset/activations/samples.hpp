// SPDX-License-Identifier: Apache-2.0
//
// Small datasets whose values are functions of row and column.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "dataset/activations/activation_writer.hpp"
#include "dataset/activations/describe.hpp"
#include "tests/scratch.hpp"

namespace weft::testing {

struct Sample {
  std::int64_t layers = 2;
  std::int64_t d_model = 6;
  std::vector<std::int64_t> rows_per_file = {40, 40, 7};  ///< all equal except the last
  kernels::Scalar dtype = kernels::Scalar::fp32;
  dataset::Compression compression = dataset::Compression::none;
};

/// The value at a row and column: both signs occur, rows differ, exact in all types.
float sample_value(std::int64_t global_row, bool target, std::int64_t column);
/// One row of inputs or targets as stored.
std::vector<std::byte> sample_row(const Sample&, std::int64_t global_row, bool target);
/// Writes the dataset in Weft's own layout. Collective; rank 0 writes.
void write_sample(const std::string& path, const Sample&);
/// sha256 of a file.
std::string file_digest(const std::string& path);
/// sha256 of the names and contents of all files of a directory.
std::string digest_of(const std::string& directory);

}  // namespace weft::testing
