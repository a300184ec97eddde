// SPDX-License-Identifier: Apache-2.0
//
// Small datasets whose every value is a function of its place, and a directory that cleans up after itself.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "dataset/activations/description.hpp"
#include "dataset/activations/writer.hpp"

namespace weft::testing {

/// A directory of this test, the same on all ranks, made by rank 0 and removed by it at the end. Collective.
class Directory {
 public:
  Directory();
  ~Directory();
  std::string path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

struct Sample {
  std::int64_t layers = 2;
  std::int64_t d_model = 6;
  std::vector<std::int64_t> rows_per_file = {40, 40, 7};  ///< all but the last equal
  kernels::Scalar dtype = kernels::Scalar::fp32;
  dataset::Compression compression = dataset::Compression::none;
};

/// The value at a place: of both signs, different from row to row, exact in all types.
float sample_value(std::int64_t global_row, bool target, std::int64_t column);
/// One row of inputs or targets as stored.
std::vector<std::byte> sample_row(const Sample&, std::int64_t global_row, bool target);
/// Writes the dataset in Weft's own layout (rank 0; the others wait).
void write_sample(const std::string& path, const Sample&);
/// sha256 of a file.
std::string file_digest(const std::string& path);
/// sha256 of all files of a directory, names included.
std::string digest_of(const std::string& directory);

}  // namespace weft::testing
