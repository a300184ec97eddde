// SPDX-License-Identifier: Apache-2.0
//
// Sequences of ids for training and evaluation. A sequence is a pure function of (settings, seed, its position): any
// rank can fill any part of a step, in any order.
//
//   random_windows   text segments of length + 1 ids, which start at uniformly random positions of the set
//   sequential       the set cut into segments of length + 1 ids with stride `length`, in order, again and again; each
//                    prediction once per epoch, unless the length changes in it
//   shuffled         the same segments, each epoch in a permutation of its own (segment_order.hpp)
//   curriculum       at first segments drawn from the easiest fraction c of the set, which grows: after t of the T
//                    steps of the curriculum c = sqrt(c0^2 + (1 - c0^2) t / T), c0 = 0.01 (Platanios et al. 2019,
//                    arXiv 1903.09848); then as random_windows. Difficulty of a segment of `sequence` ids: the sum of
//                    -log2 of their frequencies in the set, the size to which a coder of single ids compresses it.
//
// With data.pack = "documents" a segment is a row of whole documents (document_rows.hpp).
//
// The targets of a segment are its ids, shifted by one; ids that do not count in the loss are no targets. A segment may
// be short, as the last one of the set: its further targets are not counted.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dataset/tokens/document_rows.hpp"
#include "dataset/tokens/token_set.hpp"
#include "dataset/tokens/token_settings.hpp"

namespace weft::dataset {

/// Memory of sequences * length rows, sequence after sequence. The spans have rows() elements.
struct TokenBatch {
  std::int64_t sequences = 0, length = 0;
  std::span<std::uint32_t> ids;
  std::span<std::int32_t> targets;    ///< kernels::kIgnored: not counted
  std::span<std::int32_t> positions;  ///< in the sequence; with the document mask in the document
  /// Position in its sequence at which the document of each token starts. Empty without the document mask.
  std::span<std::int32_t> first_key;
  std::int64_t counted = 0;  ///< targets that count; written by the functions below

  std::int64_t rows() const { return sequences * length; }
};

/// A TokenBatch with its memory.
class TokenRows {
 public:
  TokenRows(std::int64_t sequences, std::int64_t length, bool document_mask);
  TokenBatch& batch() { return batch_; }
  const TokenBatch& batch() const { return batch_; }

 private:
  std::vector<std::uint32_t> ids_;
  std::vector<std::int32_t> targets_, positions_, first_key_;
  TokenBatch batch_;
};

/// A set in segments: `length` ids and the id after each of them, with stride `length`, or rows of documents.
class Segments {
 public:
  /// The stream.
  Segments(TokenSet set) : set_(std::move(set)) {}
  /// As data.pack says. Throws as DocumentRows.
  Segments(TokenSet set, const TokenSettings&);

  const TokenSet& set() const { return set_; }
  /// Rows of documents, which are for one length; null: the stream.
  const DocumentRows* documents() const { return rows_.get(); }
  /// Number of segments that cover the set once; of the stream ceil((size - 1) / length).
  std::int64_t count(std::int64_t length) const;
  /// Fills segments [first, first + batch.sequences); those beyond the last one count nothing. The document mask
  /// applies if the batch has `first_key`.
  void fill(std::int64_t first, TokenBatch& batch) const;

 private:
  friend class TokenBatches;
  /// The first id and the number of predictions.
  struct Place {
    std::int64_t begin = 0, predictions = 0;
  };
  Place place(std::int64_t number, std::int64_t length) const;

  TokenSet set_;
  std::shared_ptr<const DocumentRows> rows_;
};

/// Tokens of the batches of an epoch, in which each segment occurs once; of random segments the size of the set.
std::int64_t epoch_tokens(const Segments&, const TokenSettings&);

/// The training sequences.
class TokenBatches {
 public:
  /// The set has at least sequence + 1 ids. Of a curriculum, reads all of it. Throws Error(data) for an id out of
  /// range, Error(usage) if there are 2^32 segments.
  TokenBatches(Segments, const TokenSettings&, std::uint64_t seed);

  /// Fills sequences [first, first + batch.sequences) of the step that begins at token `cursor`, the number of tokens
  /// of all steps before it (cursor + first * length is the global number of the first token; the next step begins at
  /// cursor + batch_tokens). Their length is at most `sequence`. Throws Error(data) for an id out of range.
  void fill(std::int64_t cursor, std::int64_t first, TokenBatch& batch) const;

  std::int64_t epoch_tokens() const { return dataset::epoch_tokens(segments_, settings_); }

 private:
  std::int64_t random_begin(std::int64_t token, std::int64_t length) const;

  Segments segments_;
  TokenSettings settings_;
  std::uint64_t seed_;
  std::shared_ptr<const std::vector<std::uint32_t>> windows_;  // segments of a curriculum, the easiest first
};

/// Host memory of Segments and TokenBatches while they are constructed.
std::int64_t order_bytes(const TokenSettings&, std::int64_t tokens, std::int64_t vocabulary);

/// Number of records of private training: the set cut into segments of length + 1 ids that share no id; the last one
/// may be shorter, of at least two ids. One id is in one record, so that a record is removed by removing its text.
std::int64_t disjoint_windows(std::int64_t ids, std::int64_t length);

/// Records of private training that are documents of a set, or all documents of an owner. A document is cut into
/// sequences of `length` ids with the id after each of them. Of a record with more than `most_sequences` of them, as
/// many are taken, chosen by the seed and by what the record has alone: one record more or less changes no other one.
class DocumentRecords {
 public:
  enum class Grouping { by_document, by_owner };
  struct Sequence {
    std::int64_t begin = 0, predictions = 0;
  };

  /// Reads where documents start; those of one id are left out. Throws a collective Error(usage) if the set does not
  /// say that, or whom documents belong to, or has no record; else as TokenSet::read.
  DocumentRecords(const TokenSet&, Grouping, std::int64_t length, std::int64_t most_sequences, std::uint64_t seed);

  std::int64_t count() const { return std::ssize(first_) - 1; }
  std::int64_t sequences() const { return std::ssize(sequences_); }  ///< of all records
  /// Sequences of a record.
  std::span<const Sequence> of(std::int64_t record) const;

 private:
  std::vector<Sequence> sequences_;        // record after record
  std::vector<std::int64_t> first_ = {0};  // of each record; then the number of all
};
/// One of the disjoint_windows.
DocumentRecords::Sequence disjoint_window(std::int64_t ids, std::int64_t length, std::int64_t number);
/// Fills the sequences of a batch. Positions beyond the set are those of `added`, as if it followed.
void fill_sequences(const TokenSet&, std::span<const DocumentRecords::Sequence>, TokenBatch& batch,
                    const TokenSet* added = nullptr);

}  // namespace weft::dataset
