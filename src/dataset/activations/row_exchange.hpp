// SPDX-License-Identifier: Apache-2.0
//
// Sends rows of a shuffle block to the ranks that own them in a batch.
//
// Rows in memory that a rank can access are copied by that rank. All others are sent over MPI in up to 16 pieces: one
// piece is in transit while the next one is packed and the previous one is unpacked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dataset/activations/window.hpp"
#include "parallel/grid.hpp"

namespace weft::dataset {

/// Tokens [tokens.begin, tokens.end) of a batch are the rows of a shuffle block from `first_row` on.
struct Segment {
  std::int64_t first_row = 0;
  parallel::Range tokens;
};

/// Memory of the rows that this rank owns, [own tokens, row_bytes] each.
struct BatchRows {
  std::byte* inputs = nullptr;
  std::byte* targets = nullptr;
};

/// What this rank sent over MPI.
struct Traffic {
  double seconds = 0;  ///< for which messages were in transit
  std::int64_t bytes = 0;
};

class RowExchange {
 public:
  /// `windows` must outlive this.
  RowExchange(WindowReader& windows, const parallel::Grid&, std::int64_t batch_tokens, std::int64_t row_bytes);

  /// Host bytes of packed messages on the rank that needs most. An upper bound: 0 if all ranks share memory.
  static std::int64_t bytes(const parallel::GridShape&, std::int64_t batch_tokens, std::int64_t row_bytes);

  /// Delivers the rows of a segment of a loaded shuffle block. `reads` are run at the same time, after copies that were
  /// requested before them. Collective.
  Traffic deliver(const Window&, const Segment&, BatchRows to, std::vector<Job> reads);

 private:
  struct Piece;
  Piece plan_piece(const Window&, const Segment&, std::int64_t index) const;

  WindowReader& windows_;
  const std::int64_t row_bytes_;
  const std::int64_t n_pieces_;
  std::vector<parallel::Range> owned_;           // [rank] its tokens of a batch
  std::vector<std::byte> send_[2], receive_[2];  // empty if all memory is visible
};

}  // namespace weft::dataset
