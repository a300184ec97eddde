// SPDX-License-Identifier: Apache-2.0
//
// Writes the chunk files of a dataset one by one, in any order and by any process. A file is complete or not there: it
// is written under another name (.part) and renamed. An interrupted dataset is continued by writing the missing files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "dataset/activations/writer.hpp"

namespace weft::dataset {

class ChunkFiles {
 public:
  /// `contents`: what determines the rows of every file (model, text, sizes). Each file has it as its attribute
  /// "harvest", so that files of another dataset are recognised. settings.tokens is true.
  ChunkFiles(const WriterSettings& settings, Json contents);

  const WriterSettings& settings() const { return settings_; }

  /// True if file `number`, of this many rows, is there. Throws Error(usage) if it belongs to another dataset,
  /// Error(data) if it is damaged.
  bool holds(std::int64_t number, std::int64_t rows) const;

  /// Begins file `number`; creates the directory. Removes what an interrupted process left of it.
  void begin(std::int64_t number);
  /// Appends rows: inputs and targets [rows, n_layers * d_model] of settings.dtype, id and position in its window of
  /// each, and those of the appended rows (ascending from 0) at which a document begins.
  void append(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions,
              std::span<const std::int64_t> documents, const std::byte* inputs, const std::byte* targets);
  /// Closes the file, waits until it is on disk, and gives it its name.
  void finish();

 private:
  std::filesystem::path path_of(std::int64_t number) const;

  const WriterSettings settings_;
  const Json contents_;
  std::optional<storage::ActivationFileWriter> file_;
  std::int64_t number_ = 0;
  std::vector<std::int32_t> ids_, positions_;  // of the open file
  std::vector<std::int64_t> documents_;        // likewise
};

}  // namespace weft::dataset
