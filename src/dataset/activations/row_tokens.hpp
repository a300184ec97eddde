// SPDX-License-Identifier: Apache-2.0
//
// The token of each row of a dataset: its id, the document it belongs to, and the text of the id. Optional parts of
// Weft's own format (docs/file_formats.md):
//
//   /tokens      [rows] int32       of each chunk file
//   /documents   [n] int64          first row of each document of the file: ascending, the first is 0
//   DIR/vocabulary.json             text of each id
//
// The first row of a file begins a document: no context extends over two files.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/activations/description.hpp"
#include "parallel/grid.hpp"

namespace weft::dataset {

class RowTokens {
 public:
  /// The description must have tokens.
  explicit RowTokens(const Description&);
  ~RowTokens();

  /// Ids of rows [begin, begin + ids.size()) of a file. Throws Error(data) with file and row for a negative id.
  void read(std::int64_t file, std::int64_t begin, std::span<std::int32_t> ids);
  /// Rows of the document of a file that holds `row`; the whole file if no boundaries are stored. Throws Error(data)
  /// with file and entry if boundaries do not ascend from 0.
  parallel::Range document(std::int64_t file, std::int64_t row);

  struct Place {
    std::int64_t file, row;
  };
  /// The file that holds a row of the dataset in stored order, and the row there.
  Place place(std::int64_t row) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Reads and checks all ids and boundaries. Returns a line for `weft inspect`. Throws Error(data) with file, dataset
/// and row for a negative id, an id without a text, and boundaries that do not ascend from 0.
std::string check_tokens(const Description&);

/// The text of each id, [id].
using Vocabulary = std::vector<std::string>;
/// Reads DIR/vocabulary.json; empty if the dataset has none. Throws Error(data) with the file and the entry.
Vocabulary read_vocabulary(const Description&);
/// Reads the text of a vocabulary.json; messages begin with `path`.
Vocabulary vocabulary_from_text(const std::string& path, std::string_view text);
/// The contents of vocabulary.json.
std::string vocabulary_text(const Vocabulary&);

}  // namespace weft::dataset
