// SPDX-License-Identifier: Apache-2.0
//
// Writes checkpoints while training goes on. At a step boundary the state is copied into host staging memory; a thread
// writes the copy into step_XXXXXXXX.tmp/rank_NNNNN.h5; a later step boundary finishes:
//
//   every rank   write, close, reopen and look, fsync, sha256          (thread)
//   all ranks    agree that every shard is good, or drop them all      (main thread, as everything below)
//   rank 0       manifest.json, fsync, fsync of the directory, rename to step_XXXXXXXX, fsync of the parent, `latest`
//   rank 0       only now: delete what `keep` no longer covers
//
// A checkpoint exists once it is renamed. Killed at any point, the directory holds the previous one, the new one, or
// both; what else lies there ends in .tmp and is removed at the next start. The thread makes no MPI call.
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
  /// Waits for the thread; an unfinished checkpoint stays a .tmp.
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
  /// This rank's shard is written or has failed: with all ranks true `finish` does not wait. Not collective: put
  /// `!shard_done()` into the maximum that the ranks agree on each step.
  bool shard_done() const;

  /// Collective. Ends the checkpoint in flight if all shards are done (one small reduction); nothing otherwise.
  /// Throws as `finish`.
  std::optional<Report> poll();

  /// Collective. Waits for the checkpoint in flight and ends it; nullopt when there is none. Failing to write is a
  /// warning and a Report with durable = false, until `failures_allowed` in a row have failed: then a collective
  /// Error(io). A state that is not finite is never written: collective Error(numeric) naming tensor and row.
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
