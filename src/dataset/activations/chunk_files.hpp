// SPDX-License-Identifier: Apache-2.0
//
// Writes the chunk files of a dataset in any order, by any thread and process. A file is complete or not there
// (storage/pending_output.hpp). An interrupted dataset is continued by writing the missing files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "dataset/activations/activation_writer.hpp"
#include "storage/activation_file_writer.hpp"
#include "storage/pending_output.hpp"

namespace weft::dataset {

/// One file that is being written. Several may be written at the same time, each by one thread at a time.
class ChunkFile {
 public:
  ChunkFile(const WriterSettings& settings, std::int64_t rows, const Json& contents, const std::filesystem::path& path);

  /// Appends rows: inputs and targets [rows, n_layers * d_model] of settings.dtype, id and position in its text segment
  /// of each, and those of the appended rows (ascending from 0) at which a document begins.
  void append(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions,
              std::span<const std::int64_t> documents, const std::byte* inputs, const std::byte* targets);
  /// Closes the file, waits until it is on disk, and gives it its name. All rows have been appended.
  void finish();

 private:
  storage::PendingOutput output_;
  storage::ActivationFileWriter file_;
  std::vector<std::int32_t> ids_, positions_;
  std::vector<std::int64_t> documents_;
};

class ChunkFiles {
 public:
  /// `contents`: what determines the rows of every file (model, text, sizes). Each file has it as its attribute
  /// "harvest", so that files of another dataset are recognised. settings.tokens is true.
  ChunkFiles(const WriterSettings& settings, Json contents);

  const WriterSettings& settings() const { return settings_; }

  /// True if file `number`, of this many rows, is there. Throws Error(usage) if it belongs to another dataset,
  /// Error(data) if it is damaged.
  bool holds(std::int64_t number, std::int64_t rows) const;

  /// Begins file `number`, of this many rows; creates the directory. Removes what an interrupted process left of it.
  std::unique_ptr<ChunkFile> begin(std::int64_t number, std::int64_t rows) const;

 private:
  std::filesystem::path path_of(std::int64_t number) const;

  const WriterSettings settings_;
  const Json contents_;
};

}  // namespace weft::dataset
