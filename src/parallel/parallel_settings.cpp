// SPDX-License-Identifier: Apache-2.0
#include "parallel/parallel_settings.hpp"

#include "base/error.hpp"

namespace weft::parallel {

std::int64_t ranks_of_grid(const Settings& settings, std::int64_t n_ranks, bool dry_run) {
  if (settings.world > 0 && !dry_run)
    throw collective_error(ExitCode::usage,
                           "parallel.world = {} only plans (this is no --dry-run); leave it out, and start the ranks "
                           "with mpirun or srun",
                           settings.world);
  return settings.world > 0 ? settings.world : n_ranks;
}

void add_timeout_key(input::Schema& schema, Settings& parallel) {
  schema
      .add("parallel.timeout", parallel.timeout, "the job ends when a rank makes no progress for this long; 0 = never")
      .in("seconds")
      .at_least(0)
      .free();
}

void add_world_key(input::Schema& schema, Settings& parallel) {
  schema.add("parallel.world", parallel.world, "plan for this many ranks; 0 = those of this job; with --dry-run only")
      .in("ranks")
      .at_least(0)
      .at_most(1 << 20)
      .free();
}

void add_keys(input::Schema& schema, Settings& parallel) {
  schema.table("parallel", "How the ranks share the work: data x feature = number of ranks.");
  schema
      .add("parallel.feature", parallel.feature,
           "ranks that share the features of each layer; 0 = all ranks divided by data")
      .in("ranks")
      .at_least(0)
      .at_most(1 << 20)
      .free();
  schema.add("parallel.data", parallel.data, "groups of ranks; each has its part of the tokens of a batch")
      .in("groups")
      .at_least(1)
      .at_most(1 << 20)
      .free();
  add_timeout_key(schema, parallel);
  add_world_key(schema, parallel);
  schema
      .add("parallel.nvls", parallel.nvls,
           "between GPUs: true: NCCL may use NVLink multicast; false: off, unless NCCL_NVLS_ENABLE is set")
      .free();
  schema
      .add("parallel.blocks", parallel.blocks,
           "between GPUs: layers are exchanged in this many blocks, each while others are computed; 1 = no overlap")
      .at_least(1)
      .at_most(256)
      .free();
}

}  // namespace weft::parallel
