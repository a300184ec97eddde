// SPDX-License-Identifier: Apache-2.0
//
// Finds the checkpoint to resume from and reads it on any number of ranks.
//
// Files are verified before use: shards are compared with the manifest (existence, size, digests) before HDF5 opens
// them. What is read afterwards is compared with what was verified (storage/verified_file.hpp), HDF5's metadata
// included. Reads that fail are repeated for some seconds. A checkpoint that still cannot be read is not known to be
// damaged: no older one replaces it silently. If checkpoints exist, a run never silently starts from step 0.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_settings.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/registry.hpp"
#include "kernels/execution.hpp"
#include "parallel/communicator.hpp"
#include "storage/digest.hpp"

namespace weft::checkpoint {

class Lease;

struct Found {
  std::filesystem::path path;  ///< the step directory
  Manifest manifest;
  /// Tags of every block of every shard, if their digests were verified; else empty.
  std::vector<std::vector<storage::BlockTag>> tags;
};

/// What to do with *.tmp. Commands that only read a run keep them: a checkpoint may be in progress.
enum class Leftovers { keep, remove };

/// Collective; the same answer on every rank. `resume` is "auto", "never" or the path of a step directory.
/// auto: the newest valid checkpoint of `directory`; rank 0 logs a warning for each rejected one; nullopt if there is
/// no checkpoint. Those that are stale by `lease` do not count. Rank 0 reports and removes *.tmp files if requested.
/// Throws a collective Error(io) if checkpoints exist and none is valid, if the newest that is not damaged cannot be
/// read, if the requested one is not valid, and if the newest has a newer format; Error(usage) if the requested one is
/// no checkpoint.
std::optional<Found> find(const parallel::Communicator& world, const std::filesystem::path& directory,
                          const std::string& resume, Verify verify, Leftovers leftovers = Leftovers::remove,
                          const Lease* lease = nullptr);

/// True if `find` with "auto" returns a checkpoint of at least this step, or ends with an error instead of an older
/// one. Collective.
bool reaches(const parallel::Communicator& world, const std::filesystem::path& directory, std::int64_t step,
             Verify verify, const Lease* lease);

/// True for the directory of a run, also of one that has not written a checkpoint.
bool is_run(const std::filesystem::path& path);

/// True for RUN/best, the name of the checkpoint with the lowest validation loss of a run (best.hpp), unless there is
/// such a file.
bool names_best(const std::filesystem::path& path);

/// Reads and verifies one step directory, or RUN/best. Collective. Throws a collective Error(io) that names
/// the problem, and a collective Error(usage) if the path does not exist or is of something else.
Found open(const parallel::Communicator& world, const std::filesystem::path& step_directory, Verify verify);

/// everything: the checkpoint and the registry name the same tensors. part: the registry may name fewer (evaluation).
enum class Load { everything, part };

/// Collective. Fills the held rows of every tensor, whatever grid wrote them. Throws a collective Error(io) that names
/// shard and dataset, also if the shard has changed since it was verified, and a collective Error(usage) if the type or
/// shape of a tensor differs from the checkpoint.
void load(const parallel::Communicator& world, const Found& found, const Registry& registry,
          const kernels::Execution& execution, Load what = Load::everything);

}  // namespace weft::checkpoint
