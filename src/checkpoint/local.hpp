// SPDX-License-Identifier: Apache-2.0
//
// checkpoint.local: a directory on a disk of each node receives every checkpoint first; its shards are then copied to
// the run directory while training continues.
//
// clang-format off
//   LOCAL/weft_<id>/<host>/step_XXXXXXXX/   the shards of the ranks of this node, and the manifest of the whole checkpoint
//   RUN/checkpoints/local_id                the id: a random number, a new one for each start of the run
// clang-format on
//
// The protocol is that of the run directory (checkpoint_writer.hpp), with one directory per node. A checkpoint counts
// for the run once it is in the run directory; only those are read. A job that was killed before copying has left its
// newest checkpoint on the nodes: the next start copies it, if all its shards are still there, and then resumes from
// it. The new id keeps later starts from using what is left on nodes of an earlier start.
#pragma once

#include <filesystem>
#include <string>

#include "checkpoint/checkpoint_settings.hpp"
#include "checkpoint/manifest.hpp"
#include "parallel/communicator.hpp"

namespace weft::checkpoint {

class Lease;

/// The directory of this node for the id; an empty path if `local` is empty.
std::filesystem::path local_directory(const std::string& local, const std::string& id);

/// Collective. Copies the newest checkpoint that is complete on the nodes to `directory` (checkpoints/ of the run), if
/// it is newer than every valid one there, and none there is unreadable (resume.hpp). The copy names the owner of
/// `lease`; those that are stale by it are not copied. Rank 0 logs why a newer one cannot be used. `node`: the ranks of
/// this node. Nothing is changed on the nodes. To be called before it is decided whether a run is complete, which
/// depends on its newest checkpoint: for a run that has ended, that is in `directory`, and nothing is copied. Throws a
/// collective Error(io) if `directory` cannot be written.
void copy_left_on_nodes(const parallel::Communicator& world, const parallel::Communicator& node,
                        const std::filesystem::path& directory, const Settings& settings, const Lease* lease = nullptr);

/// Collective. Begins a new id, removes what an earlier start has left on the nodes, and creates the directory of each
/// node, which it returns. Throws a collective Error(io) if a node cannot write there.
std::filesystem::path begin_local(const parallel::Communicator& world, const parallel::Communicator& node,
                                  const std::filesystem::path& directory, const std::string& local);

/// Collective. Removes the directory of each node: when all its checkpoints are in the run directory.
void remove_local(const parallel::Communicator& world, const parallel::Communicator& node,
                  const std::filesystem::path& local_directory);

}  // namespace weft::checkpoint
