// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/row_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/clock.hpp"
#include "base/trace.hpp"

namespace weft::dataset {
namespace {

using parallel::Range;

// In the worst case one rank holds every row of a batch. Pieces bound the memory of its messages; two are in memory at
// a time.
constexpr std::int64_t kMostPieces = 16;
constexpr std::int64_t kPiecesInMemory = 2;
// Bytes that one job copies. Small jobs keep all threads busy until the end.
constexpr std::int64_t kBytesPerJob = std::int64_t{1} << 20;

std::int64_t n_pieces_of(std::int64_t n_ranks) { return std::min(2 * n_ranks, kMostPieces); }

/// Largest number of bytes of one piece on a rank: sent to all others together, and received.
struct PieceBytes {
  std::int64_t sent = 0, received = 0;
};
PieceBytes piece_bytes(std::int64_t largest_own, std::int64_t n_ranks, std::int64_t row_bytes) {
  const std::int64_t rows = parallel::largest_part(largest_own, n_pieces_of(n_ranks));
  return {(n_ranks - 1) * rows * 2 * row_bytes, rows * 2 * row_bytes};
}

}  // namespace

/// The messages of one part of a segment.
struct RowExchange::Piece {
  std::vector<std::int64_t> send_bytes, receive_bytes;  // [rank]
  std::vector<WindowOrder::Row> sent;                   // in the order of the message
  std::vector<std::int64_t> received;                   // tokens, in the order of the message
};

std::int64_t RowExchange::bytes(const parallel::GridShape& shape, std::int64_t batch_tokens, std::int64_t row_bytes) {
  const std::int64_t n_ranks = shape.ranks();
  if (n_ranks == 1) return 0;
  const std::int64_t largest_own = shape.largest_part(batch_tokens);
  const PieceBytes piece = piece_bytes(largest_own, n_ranks, row_bytes);
  return kPiecesInMemory * (piece.sent + piece.received);
}

RowExchange::RowExchange(WindowReader& windows, const parallel::Grid& grid, std::int64_t batch_tokens,
                         std::int64_t row_bytes)
    : windows_(windows), row_bytes_(row_bytes), n_pieces_(n_pieces_of(windows.ranks().size())) {
  const std::int64_t n_ranks = windows.ranks().size();
  std::int64_t largest_own = 0;
  for (std::int64_t r = 0; r < n_ranks; ++r) {
    owned_.push_back(grid.shape().part_of_rank(batch_tokens, r));
    largest_own = std::max(largest_own, owned_.back().size());
  }
  if (windows.all_visible()) return;
  const PieceBytes piece = piece_bytes(largest_own, n_ranks, row_bytes);
  for (auto& buffer : send_) buffer.resize(static_cast<std::size_t>(piece.sent));
  for (auto& buffer : receive_) buffer.resize(static_cast<std::size_t>(piece.received));
}

Traffic RowExchange::deliver(const Window& window, const Segment& segment, BatchRows to, std::vector<Job> reads) {
  const parallel::Communicator& ranks = windows_.ranks();
  const std::int64_t row_bytes = row_bytes_;
  const std::size_t size = static_cast<std::size_t>(row_bytes);
  const Range own = owned_[static_cast<std::size_t>(ranks.rank())];
  std::byte* const inputs = to.inputs - own.begin * row_bytes;  // indexed by token of the batch
  std::byte* const targets = to.targets - own.begin * row_bytes;
  const auto row_of = [&](std::int64_t token) {
    return window.order.rows[static_cast<std::size_t>(segment.first_row + token - segment.tokens.begin)];
  };
  const auto copy = [&](std::byte* to_inputs, std::byte* to_targets, const std::byte* memory, WindowOrder::Row row) {
    const std::int64_t offset = (window.first_row[row.block] + row.row) * row_bytes;
    std::memcpy(to_inputs, memory + window.inputs + offset, size);
    std::memcpy(to_targets, memory + window.targets + offset, size);
  };
  std::vector<Job> jobs;  // run in this order: rows of this batch before those of later ones
  const auto add = [&](std::int64_t begin, std::int64_t end, auto do_one) {
    const std::int64_t step = std::max<std::int64_t>(1, kBytesPerJob / (2 * row_bytes));
    for (; begin < end; begin += step)
      jobs.push_back([begin, end = std::min(end, begin + step), do_one] {
        for (std::int64_t i = begin; i < end; ++i) do_one(i);
      });
  };
  const auto add_copies = [&] {
    const Range mine = intersection(own, segment.tokens);
    add(mine.begin, mine.end, [&](std::int64_t token) {
      const WindowOrder::Row row = row_of(token);
      if (const std::byte* const memory = windows_.memory_of(window.reader[row.block]); memory != nullptr)
        copy(inputs + token * row_bytes, targets + token * row_bytes, memory, row);
    });
  };
  const auto add_reads = [&](Range part) {
    jobs.insert(jobs.end(), std::move_iterator(reads.begin() + part.begin),
                std::move_iterator(reads.begin() + part.end));
  };
  const std::int64_t n_reads = static_cast<std::int64_t>(reads.size());
  Traffic traffic;
  if (windows_.all_visible()) {
    add_copies();
    add_reads({0, n_reads});
    windows_.run(jobs);
    return traffic;
  }

  // Stage s packs piece s, sends piece s - 1 and unpacks piece s - 2. Reads are spread over the stages that send.
  Piece pieces[3];
  for (std::int64_t stage = 0; stage < n_pieces_ + 2; ++stage) {
    jobs.clear();
    if (stage >= 2) {
      const std::byte* const from = receive_[stage % 2].data();
      const Piece& arrived = pieces[(stage - 2) % 3];
      add(0, static_cast<std::int64_t>(arrived.received.size()), [&, from, &piece = arrived](std::int64_t i) {
        const std::int64_t token = piece.received[static_cast<std::size_t>(i)];
        std::memcpy(inputs + token * row_bytes, from + 2 * i * row_bytes, size);
        std::memcpy(targets + token * row_bytes, from + (2 * i + 1) * row_bytes, size);
      });
    }
    if (stage < n_pieces_) {
      Piece& packed = pieces[stage % 3];
      packed = plan_piece(window, segment, stage);
      std::byte* const buffer = send_[stage % 2].data();
      add(0, static_cast<std::int64_t>(packed.sent.size()), [&, buffer, &piece = packed](std::int64_t i) {
        copy(buffer + 2 * i * row_bytes, buffer + (2 * i + 1) * row_bytes, windows_.memory_of(ranks.rank()),
             piece.sent[static_cast<std::size_t>(i)]);
      });
    }
    if (stage == 1) add_copies();
    if (stage >= 1 && stage <= n_pieces_) add_reads(parallel::part(n_reads, n_pieces_, stage - 1));
    windows_.run(jobs, [&] {
      if (stage < 1 || stage > n_pieces_) return;
      const Piece& piece = pieces[(stage - 1) % 3];
      const auto began = Clock::now();
      const trace::Scope scope(trace::Row::reader, "exchange rows");
      ranks.all_to_all(send_[(stage - 1) % 2].data(), piece.send_bytes, receive_[(stage - 1) % 2].data(),
                       piece.receive_bytes);
      traffic.seconds += seconds_since(began);
      traffic.bytes += std::accumulate(piece.send_bytes.begin(), piece.send_bytes.end(), std::int64_t{0});
    });
  }
  return traffic;
}

/// Piece `index` holds one part of the tokens of every owner.
RowExchange::Piece RowExchange::plan_piece(const Window& window, const Segment& segment, std::int64_t index) const {
  const std::size_t n = owned_.size(), rank = static_cast<std::size_t>(windows_.ranks().rank());
  Piece piece{std::vector<std::int64_t>(n), std::vector<std::int64_t>(n), {}, {}};
  std::vector<std::vector<std::int64_t>> received(n);
  const auto visible = [&](std::size_t r) { return windows_.memory_of(static_cast<std::int64_t>(r)) != nullptr; };
  for (std::size_t r = 0; r < n; ++r) {
    if (r != rank && visible(r)) continue;
    const Range theirs = intersection(owned_[r], segment.tokens);
    const Range part = parallel::part(theirs.size(), n_pieces_, index);
    for (std::int64_t token = theirs.begin + part.begin; token < theirs.begin + part.end; ++token) {
      const WindowOrder::Row row =
          window.order.rows[static_cast<std::size_t>(segment.first_row + token - segment.tokens.begin)];
      const std::size_t source = static_cast<std::size_t>(window.reader[row.block]);
      if (r == rank && !visible(source)) {
        received[source].push_back(token);
        piece.receive_bytes[source] += 2 * row_bytes_;
      } else if (r != rank && source == rank) {
        piece.sent.push_back(row);
        piece.send_bytes[r] += 2 * row_bytes_;
      }
    }
  }
  for (const auto& tokens : received) piece.received.insert(piece.received.end(), tokens.begin(), tokens.end());
  return piece;
}

}  // namespace weft::dataset
