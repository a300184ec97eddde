// SPDX-License-Identifier: Apache-2.0
//
// Ends a job that hangs. A rank that waits for a dead or stopped one waits for ever: MPI has no time limit. So a thread
// of every process looks whether its process gets on; when neither it nor any other rank has for `timeout` seconds, the
// thread names the rank that is furthest behind, its host and what it was doing, and ends all ranks with code 5. A rank
// that waits for a slow one therefore goes on waiting. An error that the GPUs' communication reports by itself ends the
// job at once, in the same way.
//
// What each rank is doing stands in a file of the run directory, a record a rank, so that the thread can say it of the
// others without talking to them (they may not answer).
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <thread>

#include "parallel/world.hpp"

namespace weft::parallel {

/// What this process is doing. Cheap; called at every step and phase of it, which is progress.
void note_step(std::int64_t step);
void note_phase(std::string_view phase);
/// Progress inside a phase, from any thread: long work says so, piece by piece (a checkpoint on a slow disk).
void note_progress();

class Watchdog {
 public:
  /// Watches from now on. timeout in seconds; 0 = nothing is watched. Throws Error(io) when `file` cannot be made.
  Watchdog(const World& world, std::filesystem::path file, double timeout);
  Watchdog(const Watchdog&) = delete;
  ~Watchdog();

 private:
  void watch();
  /// Says why and ends all ranks with code 5; this process by force when even that hangs. The end of the process frees
  /// its GPU, whatever still waits there.
  static void end_job(const std::string& why);
  void publish(std::int64_t step, const char* phase) const;
  /// Progress of all ranks together, as far as they have published it: it moves while any of them does.
  std::uint64_t job_progress() const;
  /// "rank 5 on node03: no progress for 600 s in "exchange", last finished step 4812; ending the job"
  std::string diagnosis(double silent) const;

  const World& world_;
  std::filesystem::path path_;
  double timeout_;
  int file_ = -1;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

}  // namespace weft::parallel
