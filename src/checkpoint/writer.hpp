// SPDX-License-Identifier: Apache-2.0
//
// Writes checkpoints while training goes on. At a step boundary the state is copied into host staging memory; then:
//
//   every rank   write step_XXXXXXXX.tmp/rank_NNNNN.h5, close, reopen and look, fsync, sha256   (thread)
//   all ranks    agree that every shard is good, or drop them all                               (a later step boundary)
//   rank 0       manifest.json, fsync, fsync of the directory, rename to step_XXXXXXXX, fsync of the parent, `latest`;
//                only now delete what `keep` no longer covers                                   (thread)
//   all ranks    learn that it is durable                                                       (a later step boundary)
//
// A checkpoint exists once it is renamed. Killed at any point, the directory holds the previous one, the new one, or
// both; what else lies there ends in .tmp and is removed at the next start. The threads make no MPI call.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/manifest.hpp"
#include "checkpoint/registry.hpp"
#include "checkpoint/settings.hpp"
#include "kernels/execution.hpp"
#include "parallel/communicator.hpp"

namespace weft::checkpoint {

/// How a checkpoint ended; the same on every rank.
struct Report {
  std::int64_t step = 0;
  bool durable = false;
  std::filesystem::path path;  ///< of the finished checkpoint
  std::string failure;         ///< why it is not durable; already logged as a warning by rank 0
  std::int64_t bytes = 0;      ///< all shards together
  double seconds = 0;          ///< from `start` until durable, the slowest rank
  double pause = 0;            ///< of those, what the main thread spent, the slowest rank

  double gigabytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes) * 1e-9 / seconds : 0; }
  /// "checkpoint step_00001200: 1.25 GB in 0.91 s (1.37 GB/s), training paused 0.11 s"
  std::string line() const;
};

class Writer {
 public:
  /// Collective. `directory` is the run's checkpoints/; made when missing. Throws a collective Error(io) when a rank
  /// cannot write there. `resumed_from`: the checkpoint this run continues, empty for a fresh start; checkpoints in
  /// `directory` that are newer belong to an abandoned course of the run and are set aside as step_XXXXXXXX.abandoned.
  /// The registry and the communicator must outlive the writer, and the registry may not change any more.
  Writer(const parallel::Communicator& world, std::filesystem::path directory, const Settings& settings,
         const Registry& registry, const kernels::Execution& execution, const std::filesystem::path& resumed_from = {});
  /// Gives up a checkpoint in flight, which stays a .tmp: call `finish` first unless the run ends with an error.
  ~Writer();
  Writer(const Writer&) = delete;

  /// Host memory that staging takes for this rank's share.
  static std::int64_t staging_bytes(const Settings& settings, const Registry& registry);

  /// Collective, at a step boundary, with nothing in flight. Copies the state and returns; with staging = "chunked" it
  /// writes the shard before it returns. `manifest` as the caller fills it. Returns false, doing nothing, when this
  /// step's checkpoint is already durable.
  bool start(Manifest manifest);

  /// A checkpoint has been started and not finished.
  bool busy() const;
  /// This rank's thread is done: with all ranks true, `advance` does not wait. Not collective: put `!shard_done()` into
  /// the maximum that the ranks agree on each step.
  bool shard_done() const;

  /// Collective. Waits for the threads of the present phase and goes to the next; a Report when that was the last.
  /// Failing to write is a warning and a Report with durable = false, until `failures_allowed` in a row have failed:
  /// then a collective Error(io). A state that is not finite is never written: collective Error(numeric) naming tensor
  /// and row.
  std::optional<Report> advance();
  /// Collective: `advance` if no rank would wait (one small reduction), else nothing.
  std::optional<Report> poll();
  /// Collective: `advance` until nothing is in flight; nullopt when nothing was.
  std::optional<Report> finish();

  /// The newest durable checkpoint's step; -1 when there is none.
  std::int64_t last_durable() const;
  /// Duration of the last durable checkpoint in seconds, 0 before the first: the margin of a wall limit.
  double last_seconds() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Collective. Throws a collective Error(io) unless every rank can write into `directory`, which is made when missing.
void require_writable(const parallel::Communicator& world, const std::filesystem::path& directory);

}  // namespace weft::checkpoint
