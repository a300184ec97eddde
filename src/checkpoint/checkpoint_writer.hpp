// SPDX-License-Identifier: Apache-2.0
//
// Writes checkpoints while training continues. At a step boundary the state is copied into host staging memory; then:
//
// clang-format off
//   every rank   write and digest step_XXXXXXXX.TOKEN.tmp/rank_NNNNN.h5 (TOKEN: the owner's), reopen and check,
//                fsync                                                                          (threads)
//   all ranks    agree that every shard is complete, or discard all                             (a later step boundary)
//   rank 0       manifest.json, fsync, fsync of the directory, rename to step_XXXXXXXX, fsync of the parent, `latest`;
//                only then delete checkpoints that have expired                                 (thread)
//   all ranks    agree that the checkpoint is durable                                           (a later step boundary)
// clang-format on
//
// A checkpoint exists once its directory is renamed. If the job is killed at any point, the directory contains the
// previous checkpoint, the new one, or both; incomplete files end in .tmp and are removed at the next start. The
// threads make no MPI calls.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_settings.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/registry.hpp"
#include "kernels/execution.hpp"
#include "parallel/communicator.hpp"

namespace weft::checkpoint {

/// Result of one checkpoint; equal on all ranks.
struct Report {
  std::int64_t step = 0;
  bool durable = false;
  std::filesystem::path path;  ///< directory of the finished checkpoint
  std::string failure;         ///< why it is not durable; rank 0 has logged it as a warning
  std::int64_t bytes = 0;      ///< all shards together
  double seconds = 0;          ///< from `start` until durable, on the slowest rank
  double shard_seconds = 0;    ///< from `start` until the slowest rank has written, synced and digested its shard
  double pause = 0;            ///< part of `seconds` during which training waited, on the slowest rank
  bool copied = false;         ///< its shards were copied (Writer::start_copy)
  bool direct = false;         ///< all shards were written past the page cache

  double gigabytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes) * 1e-9 / seconds : 0; }
  /// "checkpoint step_00001200: 1.25 GB in 0.91 s (1.37 GB/s), training paused 0.11 s"
  std::string line() const;
};

/// A shard of a checkpoint to be copied: its index in the manifest, and the file.
struct ShardSource {
  std::size_t shard = 0;
  std::filesystem::path file;
};

class Writer {
 public:
  /// Collective. `directory`: checkpoints/ of the run, created if missing. Throws a collective Error(io) if a rank
  /// cannot write there. `resumed_from`: the checkpoint from which this run resumes; empty for a new run. Newer
  /// checkpoints in `directory` do not belong to this run any more and are renamed to step_XXXXXXXX.abandoned. Registry
  /// and communicator must outlive the writer; the registry must not change. `place`: the ranks that share the same
  /// `directory`, if it is a different one on each node; its rank 0 then does what rank 0 of the job does otherwise.
  Writer(const parallel::Communicator& world, std::filesystem::path directory, const Settings& settings,
         const Registry& registry, const kernels::Execution& execution, const std::filesystem::path& resumed_from = {},
         const parallel::Communicator* place = nullptr);
  /// Abandons a checkpoint in progress, which stays a .tmp: call `finish` first unless the run ends with an error.
  ~Writer();
  Writer(const Writer&) = delete;

  /// Host memory for staging on this rank, in bytes.
  static std::int64_t staging_bytes(const Settings& settings, const Registry& registry);

  /// Collective, at a step boundary, while no checkpoint is in progress. Copies the state and returns; with staging =
  /// "chunked" it writes the shard first. `manifest`: the fields of the caller. Returns false and does nothing if the
  /// checkpoint of this step is already durable.
  bool start(Manifest manifest);
  /// Collective. Starts a checkpoint from shards that exist: each rank copies those of `sources` in its thread and
  /// compares them with the digests of `complete`, the manifest of that checkpoint.
  bool start_copy(const Manifest& complete, std::vector<ShardSource> sources);
  /// The manifest of the checkpoint in progress, or of the last one; complete once it is durable.
  const Manifest& manifest() const;

  /// True while a checkpoint is in progress.
  bool busy() const;
  /// True if the thread of this rank has finished: `advance` does not wait if it is true on all ranks. Not collective:
  /// include `!shard_done()` in the maximum that the ranks form at each step.
  bool shard_done() const;
  /// Phases (writing, publishing) whose thread has finished on this rank, since the construction. Phases are the same
  /// on all ranks: `advance` does not wait if the minimum over the ranks `allows` it. Unlike `shard_done`, the number
  /// cannot be taken for that of a later checkpoint if the ranks act on it some steps later.
  std::int64_t phases_done() const;
  bool allows_advance(std::int64_t least_phases_done) const;

  /// Collective. Waits for the threads of the current phase and starts the next one; returns a Report after the last.
  /// If writing fails, logs a warning and returns a Report with durable = false; after `failures_allowed` consecutive
  /// failures, throws a collective Error(io). A state that is not finite is never written: collective Error(numeric)
  /// that names tensor and row.
  std::optional<Report> advance();
  /// Collective. `advance` if it would not wait on any rank (one small reduction), else nullopt.
  std::optional<Report> poll();
  /// Collective. `advance` until no checkpoint is in progress; nullopt if none was.
  std::optional<Report> finish();

  /// Step of the newest durable checkpoint; -1 if there is none.
  std::int64_t last_durable() const;
  /// Duration of the last durable checkpoint in seconds; 0 before the first. A margin for the wall-time limit.
  double last_seconds() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Collective. Creates `directory` if missing. Throws a collective Error(io) unless every rank can write there.
void require_writable(const parallel::Communicator& world, const std::filesystem::path& directory);

}  // namespace weft::checkpoint
