// SPDX-License-Identifier: Apache-2.0
//
// The ids of a text: in memory, or in token files that are mapped into memory. A set of several files is one stream of
// ids, in the order of their names.
//
//   FILE.h5, FILE.hdf5   tokens [n] uint16 or uint32, documents [d] int64, tokenizer [bytes] uint8,
//                        counted [n] uint8 (docs/file_formats.md)
//   FILE.bin             the shards of llm.c: 256 int32 (magic, version, n), then n ids of 16 or 32 bits
//
// A set may say which ids count in the loss when they are predicted; without that, all do.
//
// Files are opened read-only. Sizes in headers are checked against the size of the file; ids are checked when they are
// read, and all of them by `check`.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/world.hpp"

namespace weft::dataset {

/// What is known of ids in memory beyond the ids.
struct TokenMarks {
  std::vector<std::int64_t> documents;    ///< at which documents start, ascending from 0; empty: one document
  std::vector<std::uint8_t> counted;      ///< 1: the id counts in the loss, 0: it does not; empty: all count
  std::vector<std::int64_t> owners = {};  ///< of each document the number of its owner; empty: not known
};

/// A set of ids, or a range of one. Copies share the ids. Reading is thread-safe.
class TokenSet {
 public:
  /// Ids in memory, checked by the caller. `name` is used in messages.
  TokenSet(std::string name, std::vector<std::uint16_t> ids, std::int64_t vocabulary, std::int64_t text_bytes,
           TokenMarks marks = {});
  TokenSet(std::string name, std::vector<std::uint32_t> ids, std::int64_t vocabulary, std::int64_t text_bytes,
           TokenMarks marks = {});

  /// A token file, or all token files of a directory (in the order of their names). Reads the headers. Throws
  /// Error(data) with file and offset for files that are damaged, truncated, empty, compressed, of another type, or
  /// that do not belong together.
  static TokenSet open(const std::string& path);

  const std::string& name() const;  ///< path, for messages
  std::int64_t size() const { return end_ - begin_; }
  std::int64_t vocabulary() const;       ///< ids are below this number
  std::int64_t text_bytes() const;       ///< bytes of the text that the ids stand for; 0 = unknown
  const std::string& tokenizer() const;  ///< text form of the tokeniser (language_model/tokenizer); "" = unknown
  std::int64_t n_files() const;          ///< 0: in memory

  /// Ids [begin, begin + out.size()). Throws Error(data) with file and position for an id out of range.
  void read(std::int64_t begin, std::span<std::uint32_t> out) const;
  /// Positions in (begin, end) at which a document starts, ascending, relative to `begin`. Replaces `starts`.
  void document_starts(std::int64_t begin, std::int64_t end, std::vector<std::int64_t>& starts) const;

  /// True if it is known where documents start; of ids in memory: of JSON Lines, not of a text.
  bool has_documents() const;
  /// Number of the owner of each document; empty if it is not known.
  std::vector<std::int64_t> owners() const;
  /// True if some ids may not count in the loss.
  bool has_counted() const;
  /// Fills [begin, begin + out.size()) with 1 for ids that count in the loss, 0 for others. Throws Error(data) with
  /// file and position for another value in a file.
  void read_counted(std::int64_t begin, std::span<std::uint8_t> out) const;
  /// The same ids, of which all count.
  TokenSet counting_all() const;

  /// Ids [begin, end) as a separate set.
  TokenSet part(std::int64_t begin, std::int64_t end, std::int64_t text_bytes) const;

  /// Reads every id, which ids count, and every document offset. Throws as `read`.
  void check() const;

  /// sha256 of names, sizes, headers, and the first and last ids and a sample of those between of each file:
  /// "ends:HEX,rows:HEX" (dataset/fingerprint.hpp); "" for ids in memory.
  std::string fingerprint() const;
  /// The text that `weft inspect` prints.
  std::string summary() const;

  struct Store;

 private:
  TokenSet(std::shared_ptr<const Store> store, std::int64_t begin, std::int64_t end, std::int64_t text_bytes);

  std::shared_ptr<const Store> store_;
  std::int64_t begin_ = 0, end_ = 0, text_bytes_ = 0;
  bool all_count_ = false;
};

/// True for a file that must be a token file: by its name or its first bytes. Throws Error(data) if it is no regular
/// file.
bool is_token_file(const std::string& path);

/// True for a token file, and for a directory that has some and no activation files (chunk_*).
bool holds_tokens(const std::string& path);

/// Every rank opens the files, and compares their names and sizes with those of rank 0. Collective; errors are known to
/// all ranks.
TokenSet open_tokens(const parallel::World&, const std::string& path);

}  // namespace weft::dataset
