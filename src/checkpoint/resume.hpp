// SPDX-License-Identifier: Apache-2.0
//
// Finds the checkpoint to go on from, and reads it on any number of ranks.
//
// Nothing is believed before it is verified: shards are compared with the manifest (existence, size, digests) before
// HDF5 opens them. A run never starts afresh silently when checkpoints exist.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.hpp"
#include "checkpoint/registry.hpp"
#include "checkpoint/settings.hpp"
#include "kernels/execution.hpp"
#include "parallel/communicator.hpp"

namespace weft::checkpoint {

struct Found {
  std::filesystem::path path;  ///< the step directory
  Manifest manifest;
  bool verified = false;  ///< every byte of every shard is what its digest says
};

/// What to do with *.tmp: whoever only reads a run must keep them, a checkpoint may be on its way.
enum class Leftovers { keep, remove };

/// Collective; the same answer on every rank. `resume` is "auto", "never" or the path of a step directory.
/// auto: the newest valid checkpoint of `directory`; each rejected one is reported in one line (warning); nullopt when
/// there is none at all. Left over *.tmp are reported and removed by rank 0 when asked to. Throws a collective
/// Error(io) when checkpoints exist and none is valid, when the one asked for is not valid, and when the newest is of a
/// newer format.
std::optional<Found> find(const parallel::Communicator& world, const std::filesystem::path& directory,
                          const std::string& resume, Verify verify, Leftovers leftovers = Leftovers::remove);

/// Reads and verifies one step directory. Collective; throws a collective Error(io) naming what is wrong.
Found open(const parallel::Communicator& world, const std::filesystem::path& step_directory, Verify verify);

/// everything: the checkpoint and the registry name the same tensors. part: the registry may name fewer (evaluation).
enum class Load { everything, part };

/// Collective. Fills every tensor's held rows, whatever the grid that wrote them. Throws a collective Error(io) naming
/// shard and dataset, and a collective Error(usage) when a tensor's type or shape is not the checkpoint's.
void load(const parallel::Communicator& world, const Found& found, const Registry& registry,
          const kernels::Execution& execution, Load what = Load::everything);

}  // namespace weft::checkpoint
