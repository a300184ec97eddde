// SPDX-License-Identifier: Apache-2.0
//
// The documents of a set in rows of at most length + 1 ids. A row has as many consecutive whole documents as it can
// hold; a document that does not fit into the rest of a row begins the next one. Longer documents have their own row
// and lose what does not fit, or are left out. A row in which no id counts in the loss is left out: of a long prompt
// the completion may be what does not fit. A function of the set and the settings: the same on every rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dataset/tokens/token_set.hpp"
#include "dataset/tokens/token_settings.hpp"

namespace weft::dataset {

class DocumentRows {
 public:
  struct Row {
    std::int64_t begin = 0;
    std::int64_t ids = 0;  ///< at least 2, the last one a target only
  };

  /// Reads the starts of all documents. Throws a collective Error(data) if there is no row.
  DocumentRows(const TokenSet&, const TokenSettings&);

  const std::vector<Row>& rows() const { return rows_; }
  /// Line for the log: documents, rows, and what is left out.
  std::string summary() const;

 private:
  void add(const TokenSet&, const Row& document);
  void close(const TokenSet&);

  std::int64_t most_;  // ids of a row
  Row open_;
  std::vector<Row> rows_;
  std::int64_t documents_ = 0, long_ = 0, single_ = 0, without_loss_ = 0, left_out_ = 0, kept_ = 0;
  bool cut_;
};

/// Host memory of the rows of a set of `tokens` ids, at most.
std::int64_t document_rows_bytes(const TokenSettings&, std::int64_t tokens);

}  // namespace weft::dataset
