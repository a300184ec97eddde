// SPDX-License-Identifier: Apache-2.0
//
// Barriers in stream order between ranks whose GPUs access each other's memory, and reductions of a few values or rows.
// The host is not involved, so all of it can be captured in a graph.
//
// Each rank has a page that all others have mapped. Exchanges are numbered; every rank counts for itself, and the
// counts agree because all ranks make the same sequence of calls. To enter a barrier a rank writes the number into its
// word of each other rank's page (a word has one writer) and waits until all words of its own page have reached it.
//
// Invariants. All ranks issue their barriers in the same order (parallel/device_communicator.hpp). A barrier that
// returns because it was aborted withholds the present step and all later ones before its stream continues: kernels
// that follow must not update a parameter with what did not arrive.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/guard.hpp"

namespace weft::kernels::cuda {

constexpr int kMostPeers = 16;
/// Values of a reduction, in bytes, at most.
constexpr std::int64_t kPeerStage = 256 << 10;
/// The same of a sum of rows, and its blocks.
constexpr std::int64_t kPeerRows = 512 << 10;
constexpr int kRowBlocks = 64;

/// Eight bytes of rows under way to another GPU. Each half has four of them and a mark, and arrives as a whole: the
/// receiver waits for the mark. Zero: nothing is under way.
struct alignas(16) MarkedWord {
  std::uint64_t half[2];
};
/// Sums of rows of R ranks are formed at once up to (R - 2) times this many bytes. At 350 GB/s [estimate] 1 MiB of rows
/// then takes 6 (R - 1) µs to send, and in parts (peers_cuda.cu) 12 (R - 1) / R µs with another trip of about 1 µs.
/// Measured on two H200 (gpu_peers_test --benchmark, 2026-11-28), in µs at once and in parts: 8 KiB 3.7 and 4.7, 64 KiB
/// 4.0 and 5.1, 128 KiB 4.5 and 5.3, 256 KiB 6.2 and 6.0, 512 KiB 8.4 and 8.5. Not measured on four GPUs.
constexpr std::int64_t kMostAtOnce = 256 << 10;
/// Marked words of the largest sum of rows.
constexpr std::int64_t kRowWords = kPeerRows / 8;

/// Contents of a page. Initially zero.
struct PeerPage {
  std::uint32_t begun[kMostPeers];     ///< by rank: the last exchange that it has begun
  std::uint32_t ended[kMostPeers];     ///< by rank: the last exchange in which it has written all its data
  std::uint32_t completed;             ///< exchanges completed by the page's own rank, without sums of rows
  std::uint32_t unused[31];            ///< what follows begins at multiples of 256 bytes
  std::uint32_t row_sums[kRowBlocks];  ///< by block, all equal: sums of rows completed by the page's own rank
  std::byte stage[2][kPeerStage];      ///< values of this rank in exchanges with even and odd numbers
  MarkedWord rows[2][kRowWords];       ///< rows of the other ranks in sums of rows with even and odd numbers
  MarkedWord sums[kRowWords];          ///< sums that other ranks have formed
};

/// The ranks of one sequence of exchanges. Used by one stream at a time.
struct PeerGroup {
  PeerPage* page[kMostPeers];  ///< by rank, as mapped by this rank's GPU
  const int* aborted;          ///< host memory mapped by the GPU; not 0: pending barriers return, results are undefined
  AdamStep* step;              ///< a barrier that returns so sets step->withheld
  StepGuard* guard;            ///< and guard->halted to kExchangeAborted; null: neither
  int rank = 0;
  int size = 1;
};

/// True from `use_barriers` on: ranks of this process exchange by barriers. A kernel whose blocks occupy every
/// multiprocessor to its end then leaves room for one block of a barrier, which would otherwise delay its exchange by
/// that kernel.
bool barriers_in_use();
void use_barriers();

/// Barrier: later work on the stream runs once all ranks have reached it. Their earlier work is then done, so the
/// memory that they receive into is free.
void begin_exchange(const Execution&, const PeerGroup&);
/// Barrier at the end of an exchange: later work on the stream runs once all ranks have completed the work that they
/// enqueued since begin_exchange; what they wrote into this rank's memory is then visible.
void end_exchange(const Execution&, const PeerGroup&);

/// A complete exchange: values become their sum (maximum) over the ranks, formed in rank order. At most kPeerStage
/// bytes.
void sum(const Execution&, const PeerGroup&, Array<std::int64_t> values);
void sum(const Execution&, const PeerGroup&, Array<double> values);
void maximum(const Execution&, const PeerGroup&, Array<std::int32_t> values);
/// A complete exchange: rows become their sum over the ranks, added in fp32 in rank order. Contiguous, of at most
/// kPeerRows bytes, a multiple of 8; fp32, bf16 or fp16. at_once: the form; the bits are the same. True: at most
/// kPeerRows / (ranks - 1) bytes.
void sum_rows(const Execution&, const PeerGroup&, AnyMatrix rows, bool at_once);
/// The faster form of a sum of rows of `bytes` bytes.
constexpr bool sums_at_once(std::int64_t bytes, int ranks) { return (ranks - 2) * bytes <= kMostAtOnce; }
/// Bytes of rows and sums that a rank sends, without marks.
constexpr std::int64_t bytes_of_row_sum(std::int64_t bytes, int ranks) {
  return sums_at_once(bytes, ranks) ? bytes * (ranks - 1) : 2 * (bytes * (ranks - 1) / ranks);
}
/// Complete exchanges, one for each kPeerStage bytes of a piece: `all` consists of one piece of equal size per
/// rank, in rank order; each rank provides its own. None if *needed, on the device and the same on all ranks, is 0.
void all_gather_if(const Execution&, const PeerGroup&, const std::uint32_t* needed, Array<std::uint32_t> all);

}  // namespace weft::kernels::cuda
