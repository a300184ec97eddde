// SPDX-License-Identifier: Apache-2.0
//
// Ends a job that hangs. MPI calls have no time limit: a rank that waits for a dead or stopped rank waits forever. A
// thread of every process therefore monitors progress. If no rank makes progress for `timeout` seconds, the thread
// names the rank that is furthest behind, its host and its phase, and ends all ranks with code 5 (parallel::end_job).
// While any rank makes progress, ranks that wait for it are not ended. An error that NCCL reports asynchronously ends
// the job at once.
//
// Each rank publishes its step and phase in a file of the run directory, one record per rank, so that the message can
// describe ranks that do not respond.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <thread>

#include "parallel/world.hpp"

namespace weft::parallel {

/// Step and phase of this process. Each call counts as progress; cheap enough for every phase of every step.
void note_step(std::int64_t step);
void note_phase(std::string_view phase);
/// Progress within a long phase, such as a checkpoint on a slow disk. From any thread.
void note_progress();

class Watchdog {
 public:
  /// Starts monitoring. `timeout` in seconds; 0 = no monitoring. Throws Error(io) if `file` cannot be created.
  Watchdog(const World& world, std::filesystem::path file, double timeout);
  Watchdog(const Watchdog&) = delete;
  ~Watchdog();

 private:
  void watch();
  void publish(std::int64_t step, const char* phase) const;
  /// Sum of the published progress counters: changes while any rank makes progress.
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
