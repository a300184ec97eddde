// SPDX-License-Identifier: Apache-2.0
//
// benchmark.checkpoint = true: how fast the state is written and read back, against plain files on the same disk.
#pragma once

#include <filesystem>
#include <functional>

#include "checkpoint/registry.hpp"
#include "kernels/execution.hpp"
#include "parallel/world.hpp"

namespace weft::bench {

/// Medians over some tries, each the time of the slowest rank.
struct CheckpointResult {
  std::int64_t bytes = 0;                                  ///< bytes of all shards together
  int writers = 1;                                         ///< ranks, all at the same time
  int cores = 1;                                           ///< cores of this node
  double write_seconds = 0, read_seconds = 0;              ///< until durable; verified in full and loaded
  double plain_write_seconds = 0, plain_read_seconds = 0;  ///< as many bytes and writers: write(2) of 1 MiB and fsync
  double pause_seconds = 0;                  ///< part of write_seconds for which training would have waited
  double copy_seconds = 0;                   ///< one copy of the state into host memory
  double write_processor_seconds = 0;        ///< sum over all ranks while a checkpoint is written
  double plain_write_processor_seconds = 0;  ///< the same for plain files; without the kernel's threads
  bool direct = false;                       ///< the checkpoint was written past the page cache

  /// While the model trains: the shards until they are synced and digested, and plain files as above. A rank writes one
  /// file in a thread and makes steps in another, as in a run.
  double busy_write_seconds = 0, busy_plain_seconds = 0;
  double busy_durable_seconds = 0;  ///< until durable: two more agreements, each at the end of a step
  double step_seconds = 0;          ///< duration of a step without writing
  double slow_step_seconds = 0;     ///< duration of a step during a checkpoint

  double busy_write_percent() const { return 100 * busy_plain_seconds / busy_write_seconds; }
  double write_percent() const { return 100 * plain_write_seconds / write_seconds; }
  double read_percent() const { return 100 * plain_read_seconds / read_seconds; }
};

/// Collective. Writes under `directory`, which must not exist, and removes it again. Files are evicted from the page
/// cache before they are read; every measurement starts after some seconds of rest. Throws a collective Error(io).
/// `step` makes a step of the model that owns the registry, on all ranks.
CheckpointResult measure_checkpoint(const std::filesystem::path& directory, const checkpoint::Registry&,
                                    const kernels::Execution&, const parallel::World&,
                                    const std::function<void()>& step);

}  // namespace weft::bench
