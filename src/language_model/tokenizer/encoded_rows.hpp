// SPDX-License-Identifier: Apache-2.0
//
// Rows of JSON Lines as ids, and which of these count in the loss. The text of a row is encoded as a whole. An id
// counts if it is behind the ids of the text before the place where counting begins; where these ids differ next to the
// rest of the text (a token that joins both), behind their common beginning.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "language_model/tokenizer/json_rows.hpp"
#include "language_model/tokenizer/piece_cache.hpp"
#include "language_model/tokenizer/tokenizer.hpp"

namespace weft::language_model {

struct EncodedRow {
  std::vector<std::uint32_t> ids;
  std::vector<std::uint8_t> counted;  ///< of each id 1 or 0
  bool joined = false;                ///< a token joins texts that count and texts that do not
};

/// The id with which a row ends: the eos_token of tokenizer_config.json, else the end of a text; -1: there is none.
std::int64_t end_symbol(const Tokenizer&);

/// Texts and completions get the ids that the tokeniser adds to a text, and `last` (end_symbol) if they do not end with
/// it. Segments have what their template gives them. An empty text has no ids. Throws Error(data) "SOURCE: …" for a
/// text that cannot be encoded.
EncodedRow encode_row(const Tokenizer&, std::int64_t last, const JsonRow&, const std::string& source,
                      PieceCache& cache);

struct RowCounts {
  std::int64_t texts = 0, completions = 0, segments = 0;  ///< rows of each form
  std::int64_t empty = 0, skipped = 0, joined = 0;        ///< rows without text, bad lines, rows with such tokens
  std::int64_t tokens = 0, counted = 0;

  std::int64_t rows() const { return texts + completions + segments; }
};

/// Called for each row in order: ids, of each 1 if it counts in the loss, the row.
using TakeRow = std::function<void(std::span<const std::uint32_t>, std::span<const std::uint8_t>, const JsonRow&)>;

/// Reads and encodes all rows of a file with several threads, and logs what was found. Throws Error(data) as the reader
/// does, and if no row has text.
RowCounts encode_rows(const Tokenizer&, const std::string& path, dataset::BadLines, int n_threads, const TakeRow& take,
                      const std::string& owner_field = "");

/// Calls `take` for the text of each row, in order.
void for_each_text(const std::string& path, dataset::BadLines, const std::function<void(std::string_view)>& take,
                   const std::string& owner_field = "");

}  // namespace weft::language_model
