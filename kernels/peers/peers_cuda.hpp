// SPDX-License-Identifier: Apache-2.0
//
// Ranks whose GPUs reach one another's memory: how they meet in the order of their streams, and reductions of a few
// values. No host takes part, and a graph may hold all of it.
//
// Each rank has a page that all others have mapped. A meeting has a number, which every rank counts for itself: they
// are the same because all ranks meet equally often. To come to a meeting a rank writes its number into a word of each
// other rank's page (a word has one writer) and waits until all words of its own page have reached it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels::cuda {

constexpr int kMostPeers = 16;
/// Values of a reduction, in bytes, at most.
constexpr std::int64_t kPeerStage = 256 << 10;

/// What lies in a page. Zero at the beginning.
struct PeerPage {
  std::uint32_t come[kMostPeers];      ///< by rank: the number of the last meeting it has come to
  std::uint32_t finished[kMostPeers];  ///< by rank: the last meeting after which it has written all it had to
  std::uint32_t number;                ///< meetings that are over; of the page's own rank
  std::uint32_t unused[31];            ///< stages begin at a multiple of 256 bytes
  std::byte stage[2][kPeerStage];      ///< values of this rank, of meetings with even and odd numbers
};

/// One sequence of meetings. Work on one stream at a time.
struct Meetings {
  PeerPage* page[kMostPeers];  ///< by rank, as this rank's GPU sees them
  const int* given_up;         ///< host memory that the GPU sees: not zero once nobody is to be waited for any more
  int rank = 0;
  int size = 1;
};

/// What comes after it runs once all ranks have come here: what lies before it on their streams is done, so memory that
/// they are about to receive into is free.
void meet(const Execution&, const Meetings&);
/// Ends a meeting: what comes after it runs once all ranks have done what they enqueued since `meet`: what they wrote
/// into this rank's memory is there.
void part(const Execution&, const Meetings&);

/// A meeting of its own: values become their sum (maximum) over the ranks, formed in rank order. At most kPeerStage
/// bytes.
void sum(const Execution&, const Meetings&, Array<std::int64_t> values);
void sum(const Execution&, const Meetings&, Array<double> values);
void maximum(const Execution&, const Meetings&, Array<std::int32_t> values);

}  // namespace weft::kernels::cuda
