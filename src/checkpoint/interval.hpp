// SPDX-License-Identifier: Apache-2.0
//
// What a checkpoint costs and, with checkpoint.every = "auto", how often to write one.
//
// A checkpoint has two costs. Its duration, from the copy of the state until it is durable in the run directory, is the
// margin that a run needs before its wall-time limit. Its delay is the time that training loses to it: the pause, and
// the slower steps while it is written. Both are measured, and recorded in starts.jsonl for the next start of the run.
// Before the first checkpoint of a run they are estimated from the bytes of the state and the write speed of the disk.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/clock.hpp"
#include "checkpoint/checkpoint_settings.hpp"
#include "parallel/communicator.hpp"

namespace weft::checkpoint {

struct Cost {
  double duration = 0;    ///< seconds
  double delay = 0;       ///< seconds
  bool measured = false;  ///< false: an estimate, an upper bound of `delay`
};

/// Collective; the same on every rank. Writes a file of at most 16 MiB per rank in `directory` for about half a second
/// at most, with fsync, and removes it. `bytes`: that this rank writes into a checkpoint. Throws a collective
/// Error(io).
Cost estimate_cost(const parallel::Communicator& world, const std::filesystem::path& directory, std::int64_t bytes);

/// Seconds of training between two checkpoints that minimise the time lost to checkpoints and to failures: Daly, A
/// higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22
/// (2006), equation 37; Young's √(2 · delay · time between failures) to first order. Both arguments are in seconds.
double best_interval(double delay, double between_failures);

/// The interval of checkpoint.every = "auto". Used by rank 0, whose clock counts; the other ranks learn of a due
/// checkpoint through the agreement of each step.
class Interval {
 public:
  Interval(const Settings& settings, const Cost& known);

  /// A step took `seconds`; `writing`: a checkpoint was in progress.
  void note_step(double seconds, bool writing);
  /// A checkpoint was started, for any reason.
  void note_start(Clock::time_point now);
  /// A checkpoint is durable: `duration` as in Cost, `pause`: part of it during which training waited. Logs the
  /// interval if it has changed by more than a tenth.
  void note_durable(double duration, double pause);

  /// Sets the duration, if copies to the run directory add to it (checkpoint.local).
  void note_duration(double duration) { cost_.duration = duration; }

  /// True once per interval, when the time since the last start of a checkpoint exceeds it. Always false if
  /// checkpoint.every is a number of steps.
  bool due(Clock::time_point now);

  const Cost& cost() const { return cost_; }
  /// Seconds; 0 if checkpoint.every is a number of steps.
  double seconds() const { return automatic_ ? seconds_ : 0; }
  /// "checkpoint.every = "auto": one every 0:06:55 (each delays training by 1.00 s, …"
  std::string line() const;

 private:
  /// Steps since the last durable checkpoint, with and without one in progress.
  struct Steps {
    double seconds = 0;
    std::int64_t count = 0;
    double mean() const { return count > 0 ? seconds / static_cast<double>(count) : 0; }
  };

  void update();

  bool automatic_;
  double between_failures_;  // seconds
  Cost cost_;
  double seconds_ = 0, logged_seconds_ = 0;
  Steps writing_, others_;
  Clock::time_point started_;
  bool requested_ = false;
};

}  // namespace weft::checkpoint
