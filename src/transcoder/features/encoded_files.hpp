// SPDX-License-Identifier: Apache-2.0
//
// The sparse activations of a dataset as files for other programs (docs/file_formats.md): encoded_{i}.h5 has the rows
// of chunk file i, metadata.json is written last and marks the set as complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "dataset/activations/description.hpp"
#include "transcoder/features/sparse_rows.hpp"
#include "transcoder/parameters/model.hpp"

namespace weft::transcoder {

class EncodedFiles {
 public:
  /// Starts a set of files in `directory`, which is created if necessary and must not hold encoded files. Collective.
  /// Throws a collective Error(io), and Error(usage) for more than 2^32 features.
  EncodedFiles(const std::filesystem::path& directory, const std::string& checkpoint, std::int64_t step,
               const dataset::Description&, const Model&, const parallel::Grid&);
  EncodedFiles(const EncodedFiles&) = delete;
  /// Removes the files unless `finish` was called (storage/pending_output.hpp).
  ~EncodedFiles();

  /// Appends a batch, whose entries are divided over the ranks by feature: rank 0 joins and writes them. Batches come
  /// in stored order. Collective. Throws a collective Error(io).
  void append(const SparseRows&);
  /// Completes the files. Must be called. Collective.
  void finish();

  std::int64_t entries() const;  ///< number of entries written; valid on rank 0

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft::transcoder
