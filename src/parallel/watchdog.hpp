// SPDX-License-Identifier: Apache-2.0
//
// Ends a job that hangs. MPI calls have no time limit: a rank that waits for a dead or stopped rank waits forever. From
// MPI_Init to the end of MPI_Finalize a thread of every process therefore monitors progress. If no rank makes progress
// for the timeout, it names the rank that is behind, its host and its phase, and ends all ranks with code 5
// (parallel::end_job). While any rank makes progress, ranks that wait for it are not ended. An error that NCCL reports
// asynchronously ends the job at once.
//
// Progress is a completed collective call, a phase, a step, or a piece of a long loop (base/progress.hpp).
//
// Between `connect` and `disconnect` a second thread exchanges progress, step and phase of all ranks every half second:
// each rank sends its own to rank 0, which sends the sum to all. These messages are non-blocking and have a
// separate communicator; `connect` exchanges the first ones. Before and after, and if MPI itself blocks, each
// process has its own progress only. Rank 0 ends the job; if it does not respond, the lowest rank that does.
//
// The time during which a process is suspended (scheduler, debugger) does not count.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/progress.hpp"
#include "parallel/communicator.hpp"

namespace weft::parallel {

using weft::note_progress;

/// Step and phase of this process. Each call counts as progress; cheap enough for every phase of every step.
void note_step(std::int64_t step);
void note_phase(std::string_view phase);

/// Seconds without progress of any rank before the job ends (parallel.timeout); 0 = never. Until it is set: 600.
void set_timeout(double seconds);
double timeout();

/// Last known state of a rank.
struct RankPulse {
  int rank = 0;
  std::uint64_t progress = 0;  ///< progress of that rank; from rank 0: of all ranks
  std::int64_t step = 0;
  std::string host, phase;
  Clock::time_point at;  ///< time of its last message
  bool left = false;     ///< the last message was its final one: it waits for the end of the program
};

/// The rank that keeps a job from making progress, as known to `self` at its time `at`: the one that has been silent
/// longest, if longer than `silence` seconds; else the one with the fewest steps. Ranks that have left are no cause.
struct HangCause {
  RankPulse rank;
  bool responds = true;
};
HangCause cause_of_hang(const RankPulse& self, std::span<const RankPulse> others, double silence);

/// One object per process, of parallel::World.
class Watchdog {
 public:
  /// Starts monitoring this process.
  Watchdog(int rank, int size, std::string host);
  Watchdog(const Watchdog&) = delete;
  /// Ends monitoring.
  ~Watchdog();

  const std::string& host() const { return host_; }

  /// Starts the exchange of progress between ranks. Collective.
  void connect(const Communicator& all);
  /// Ends the exchange of progress, before MPI_Finalize; waits until all ranks call it. Collective.
  void disconnect();

 private:
  struct Pulse;  // the message
  struct Line;   // to and from one rank

  void monitor();
  void exchange();
  Pulse own_pulse() const;
  void hear(int rank, const Pulse&);
  /// Changes while any rank makes progress.
  std::uint64_t job_progress() const;
  /// Seconds to wait beyond the timeout, so that one rank reports.
  double grace() const;
  /// "rank 5 on node03: no progress for 600 s in "exchange", at step 4812 (…); ending the job; …"
  std::string diagnosis(double silent) const;

  const int rank_, size_;
  const std::string host_;
  mutable std::mutex mutex_;  // protects the members up to the threads
  std::condition_variable changed_;
  std::vector<RankPulse> heard_;  // last messages of other ranks
  bool leaving_ = false, over_ = false;
  std::optional<Communicator> ranks_;  // communicator of the exchange of progress
  std::thread messenger_, monitor_;
};

}  // namespace weft::parallel
