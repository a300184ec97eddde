// SPDX-License-Identifier: Apache-2.0
//
// Rows of a dataset that are computed when they are read, for example by a language model (Description::source).
// Everything that reads a dataset reads it through Reader, which calls the source instead of reading files: order,
// shuffle blocks, statistics, evaluation and the exchange between ranks are the same for both.
#pragma once

#include <span>

namespace weft::dataset {

struct RowRead;

class RowSource {
 public:
  virtual ~RowSource() = default;

  /// Starts to fill the destinations. A row has the same bits whenever and together with whatever rows it is read.
  /// Called by the thread of the training steps alone. Ranks read different rows; a source that several ranks form
  /// together is read by all of them equally often, or they end with `conclude`.
  virtual void read(std::span<const RowRead>) = 0;
  /// Returns when all destinations are filled. Throws what the reads threw. Called as often as `read`.
  virtual void finish() = 0;
  /// Returns when no destination is written any more. Concerns this rank alone.
  virtual void wait() = 0;
  /// Called on each rank after reads whose number differs between ranks: returns when all have called it, and takes
  /// part in the reads of the others until then.
  virtual void conclude() = 0;
};

}  // namespace weft::dataset
