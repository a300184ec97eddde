// SPDX-License-Identifier: Apache-2.0
//
// The order of rows in training: a pure function of (seed, epoch, rows per file, block_rows, window_rows).
//
//   block           block_rows consecutive rows of one file; the last block of a file may be shorter
//   epoch           every block once, in a random order
//   shuffle block   the next window_rows / block_rows blocks (at least one) of that order, whose rows are shuffled
//                   together; names in the program call it a window
//   batch           the next batch_tokens rows; batches may span shuffle blocks and epochs
//
// Every row occurs exactly once per epoch. The order does not depend on ranks, threads or batch size.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dataset/activations/description.hpp"
#include "dataset/dataset_settings.hpp"
#include "kernels/random.hpp"

namespace weft::dataset {

/// Position in the data: the next row is number `position` (in [0, n_rows)) of the order of `epoch`.
struct Cursor {
  std::int64_t epoch = 0;
  std::int64_t position = 0;
  bool operator==(const Cursor&) const = default;
};

struct Block {
  std::int64_t file = 0;
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
};

/// The blocks of a dataset in stored order.
struct BlockTable {
  std::vector<Block> blocks;
  std::int64_t n_rows = 0;
  std::int64_t block_rows = 0;
  std::int64_t blocks_per_window = 1;

  std::int64_t n_windows() const;  ///< shuffle blocks of an epoch
};

/// Throws a collective Error(usage) if block_rows or window_rows is below 1 or there are 2^32 blocks or more.
BlockTable block_table(std::span<const std::int64_t> rows_per_file, std::int64_t block_rows, std::int64_t window_rows);
BlockTable block_table(const Description&, const Settings&);

/// A permutation of [0, n) (Fisher-Yates on the counter-based generator; index = first_index + i for step i).
std::vector<std::uint32_t> permutation(std::int64_t n, std::uint64_t seed, kernels::Purpose purpose, std::uint64_t step,
                                       std::uint64_t first_index);

/// An epoch: its blocks in order, and the first position of each shuffle block.
struct EpochOrder {
  std::int64_t epoch = 0;
  std::vector<std::uint32_t> blocks;       ///< indices into BlockTable::blocks
  std::vector<std::int64_t> window_begin;  ///< [n_windows + 1] positions

  std::int64_t window_of(std::int64_t position) const;
};
EpochOrder epoch_order(const BlockTable&, std::uint64_t seed, std::int64_t epoch);

/// One shuffle block: its blocks, and the row at each of its positions.
struct WindowOrder {
  struct Row {
    std::uint32_t block;  ///< index into `blocks` below
    std::uint32_t row;    ///< row of that block
  };
  std::int64_t begin = 0;             ///< position of the first row in the epoch
  std::vector<std::uint32_t> blocks;  ///< indices into BlockTable::blocks
  std::vector<Row> rows;              ///< rows[i] is at position begin + i
};
WindowOrder window_order(const BlockTable&, const EpochOrder&, std::uint64_t seed, std::int64_t window);

/// The cursor `n` rows later.
Cursor advance(const BlockTable&, Cursor, std::int64_t n);

/// Rows [begin, end) of a file.
struct RowRange {
  std::int64_t file = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Locations of the `n` rows from `cursor` on, for messages: ranges in stored order, adjacent ones merged.
std::vector<RowRange> locate(const BlockTable&, std::uint64_t seed, Cursor cursor, std::int64_t n);
/// "chunk_0.hdf5 rows 0-255, 512-767; chunk_1.hdf5 rows 0-255; and 12 more ranges"
std::string to_text(const Description&, std::span<const RowRange>);

}  // namespace weft::dataset
