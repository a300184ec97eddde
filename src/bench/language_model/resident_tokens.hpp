// SPDX-License-Identifier: Apache-2.0
//
// Batches in memory, for weft benchmark: the first segments of token files, or random ids, half of which follow from
// the one before, while the others have Zipf-like frequencies, so that there is something to learn and losses differ
// when the training does.
#pragma once

#include <cstdint>
#include <vector>

#include "dataset/tokens/batches.hpp"

namespace weft::bench {

class ResidentTokens {
 public:
  /// Random ids: `batches` batches of `sequences` segments of length + 1 ids below `vocabulary`. A function of the
  /// arguments alone.
  ResidentTokens(std::int64_t batches, std::int64_t sequences, std::int64_t length, std::int64_t vocabulary,
                 double zipf, std::uint64_t seed);
  /// The segments of a set, which has at least one, in order; again from the first where it ends.
  ResidentTokens(std::int64_t batches, std::int64_t sequences, std::int64_t length, const dataset::TokenSet&);

  /// Copies the segments of the next batch, in turn, from `first` on, as many as the argument has.
  void fill(dataset::TokenBatch&, std::int64_t first);

 private:
  std::int64_t length_;
  std::vector<std::vector<std::uint32_t>> ids_;  // by batch: [sequences, length + 1]
  std::size_t next_ = 0;
};

}  // namespace weft::bench
