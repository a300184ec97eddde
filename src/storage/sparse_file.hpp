// SPDX-License-Identifier: Apache-2.0
//
// One file of sparse rows in HDF5 (CSR): /offsets int64 [rows + 1], /feature uint32 [entries], /value fp32 [entries].
// Entries of row r are [offsets[r], offsets[r + 1]). Files of the same rows are identical.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "storage/hdf5.hpp"

namespace weft::storage {

class SparseFileWriter {
 public:
  /// `texts` and `numbers` become attributes of the root group. Never overwrites. Throws Error(io).
  SparseFileWriter(const std::filesystem::path& path, const std::map<std::string, std::string>& texts,
                   const std::map<std::string, std::int64_t>& numbers);

  /// Appends rows: their numbers of entries, and the entries one row after the other. Keeps 8 bytes per row in memory.
  void append(std::span<const std::int64_t> counts, std::span<const std::uint32_t> feature,
              std::span<const float> value);
  std::int64_t rows() const { return static_cast<std::int64_t>(offsets_.size()) - 1; }
  std::int64_t entries() const { return offsets_.back(); }
  /// Must be called: writes the offsets and reports errors that occur on closing.
  void close();

 private:
  std::string path_;
  Handle file_, feature_, value_;
  std::vector<std::int64_t> offsets_{0};
};

}  // namespace weft::storage
