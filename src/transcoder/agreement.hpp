// SPDX-License-Identifier: Apache-2.0
//
// What ranks must agree on beside the step: stopping, checkpoints, the end of a checkpoint in flight. Each step every
// rank posts what it knows in one small non-blocking maximum; the answer is acted on two steps later, by all ranks at
// the same step. So a signal that reached one rank only, or rank 0's clock, moves all of them together, and no step
// waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>

#include "parallel/communicator.hpp"

namespace weft::transcoder {

/// The same on every rank.
struct Decision {
  std::int64_t stop = 0;        ///< exit code to stop with; 0 = go on
  bool checkpoint = false;      ///< write one now
  bool shards_written = false;  ///< every rank's part of the checkpoint in flight is on disk
};

class Agreement {
 public:
  /// `walltime`: seconds from `start` that the job may last; 0 = no limit. Files STOP and CHECKPOINT in `run_directory`
  /// ask as signals do; rank 0 looks for them, acts and removes them.
  Agreement(const parallel::Communicator& world, std::filesystem::path run_directory, double walltime,
            std::chrono::steady_clock::time_point start);

  /// At the end of each step. `shard_written`: this rank has nothing left to write. `margin`: seconds before the wall
  /// limit at which to stop. Returns what was posted two steps ago.
  Decision step(bool shard_written, double margin);

  /// Waits for what is still in flight: before the communicator is used for something slow, or freed. Returns the
  /// strongest wish.
  Decision drain();

 private:
  static Decision read(parallel::Communicator::PendingMaximum pending);
  bool asked_by_file(const char* name);

  parallel::Communicator world_;
  std::filesystem::path run_directory_;
  double walltime_;
  std::chrono::steady_clock::time_point start_, looked_;
  bool stop_file_ = false, checkpoint_file_ = false;
  std::deque<parallel::Communicator::PendingMaximum> pending_;
};

}  // namespace weft::transcoder
