// SPDX-License-Identifier: Apache-2.0
//
// What ranks agree on outside the step: stopping, checkpoints, the progress of checkpoints in flight. At each step
// every rank posts its state in one small non-blocking maximum; all ranks act on the result two steps later, at the
// same step. A signal that reached one rank only, or the clock of rank 0, therefore takes effect on all ranks together,
// and no step waits.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <span>
#include <vector>

#include "base/clock.hpp"
#include "parallel/communicator.hpp"

namespace weft::run {

/// Steps that the host may be ahead of a GPU: enough that the GPU never runs out of work.
inline constexpr std::int64_t kStepsAhead = 2;

/// What the ranks have agreed on; equal on every rank.
struct Decision {
  std::int64_t stop = 0;             ///< exit code to stop with; 0 = continue
  bool checkpoint = false;           ///< write one now
  std::vector<std::int64_t> phases;  ///< checkpoint phases completed by all ranks; empty in the first two steps
};

class StopAgreement {
 public:
  /// `walltime`: seconds from `start` that the job may last; 0 = no limit. Files STOP and CHECKPOINT in `run_directory`
  /// are requests like signals; rank 0 detects and removes them. Collective.
  StopAgreement(const parallel::Communicator& world, std::filesystem::path run_directory, double walltime,
                Clock::time_point start);

  /// Called at the end of each step. `phases`: checkpoint phases completed by this rank. `margin`: seconds before the
  /// wall limit at which to stop. `checkpoint`: this rank requests one. Returns what was posted two steps ago.
  Decision step(std::span<const std::int64_t> phases, double margin, bool checkpoint);

  /// The request that led to this exit code, as known to rank 0: "run.walltime", "the file STOP", "SIGTERM".
  std::string cause(std::int64_t stop) const;

  /// Completes what is in flight, before the communicator is freed.
  void drain();

 private:
  static Decision read(parallel::Communicator::PendingMaximum pending);
  bool requested_by_file(const char* name);

  parallel::Communicator world_;
  std::filesystem::path run_directory_;
  double walltime_;
  Clock::time_point start_, looked_;
  bool stop_file_ = false, checkpoint_file_ = false, out_of_time_ = false;
  std::deque<parallel::Communicator::PendingMaximum> pending_;
};

}  // namespace weft::run
