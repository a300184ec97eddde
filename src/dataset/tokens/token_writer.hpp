// SPDX-License-Identifier: Apache-2.0
//
// Writes a set of token files: DIR/tokens_00000.h5, … and the tokeniser, DIR/tokenizer.json. The set appears under its
// name when it is complete.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "storage/pending_output.hpp"

namespace weft::dataset {

class TokenWriter {
 public:
  struct Written {
    std::int64_t tokens = 0, documents = 0, files = 0, text_bytes = 0;
  };

  /// `directory` must not exist, or be empty. Ids are below `vocabulary`; `tokenizer`: its text form. A file takes
  /// `tokens_per_file` ids. Throws Error(usage) if it does, Error(io).
  TokenWriter(const std::string& directory, std::int64_t vocabulary, std::string tokenizer,
              std::int64_t tokens_per_file = std::int64_t{1} << 26);

  /// Appends a document that stands for `text_bytes` bytes of text. Empty documents are left out. Where a file ends
  /// within a document, the rest of it counts as a document of its own. counted: of each id 1 if it counts in the loss,
  /// else 0; empty: all count.
  void append(std::span<const std::uint32_t> ids, std::int64_t text_bytes, std::span<const std::uint8_t> counted = {});
  /// Completes the set. To be called once, at the end. Throws Error(data) if there are no ids.
  Written finish();

 private:
  void write(std::size_t count);

  storage::PendingOutput output_;
  std::int64_t vocabulary_, tokens_per_file_;
  std::string tokenizer_;
  std::vector<std::uint32_t> ids_;        // not yet in a file
  std::vector<std::uint8_t> counted_;     // of ids_
  std::vector<std::int64_t> documents_;   // their starts in `ids_`
  std::vector<std::int64_t> text_bytes_;  // bytes of text of each of these documents
  Written written_;
};

}  // namespace weft::dataset
