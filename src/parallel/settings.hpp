// SPDX-License-Identifier: Apache-2.0
//
// Table [parallel]: the process grid, and how ranks exchange.
#pragma once

#include <cstdint>

#include "parallel/device_communicator.hpp"

namespace weft::parallel {

/// Table [parallel].
struct Settings {
  std::int64_t feature = 0;  ///< 0 = all ranks divided by `data`
  std::int64_t data = 1;
  std::int64_t tensor = 1;  ///< language models: ranks that share every matrix
  double timeout = 600;     ///< seconds without progress of any rank before the job ends; 0 = never
  std::int64_t world = 0;   ///< plan for this many ranks; dry run only
  bool nvls = false;        ///< NCCL may use NVLink multicast
  std::int64_t blocks = 4;  ///< blocks of layers whose exchanges overlap with computation; 1: no overlap
  // No keys: a benchmark compares training with other implementations.
  bool overlap = true;  ///< language models: exchange beside computation
  ExchangeStrategy exchange;
};

/// The ranks of the grid: parallel.world in a dry run, else those of the job. Throws a collective Error(usage) if
/// parallel.world is given in another run.
std::int64_t ranks_of_grid(const Settings&, std::int64_t n_ranks, bool dry_run);

/// parallel.timeout: every run has a watchdog.
template <class Schema>
void add_timeout_key(Schema& schema, Settings& parallel) {
  schema
      .add("parallel.timeout", parallel.timeout, "the job ends when a rank makes no progress for this long; 0 = never")
      .in("seconds")
      .at_least(0)
      .free();
}

/// parallel.tensor, of models whose matrices are divided.
template <class Schema>
void add_tensor_key(Schema& schema, Settings& parallel) {
  schema
      .add("parallel.tensor", parallel.tensor,
           "ranks that share every matrix and compute on the same tokens, a divisor of the number of ranks; the others "
           "divide the batch. For models that do not fit one GPU: ranks of one node, which exchange in every layer")
      .in("ranks")
      .at_least(1)
      .at_most(1 << 10)
      .free();
}

/// parallel.world, of models with a grid.
template <class Schema>
void add_world_key(Schema& schema, Settings& parallel) {
  schema.add("parallel.world", parallel.world, "plan for this many ranks; 0 = those of this job; with --dry-run only")
      .in("ranks")
      .at_least(0)
      .at_most(1 << 20)
      .free();
}

/// The keys of the table, bound to the settings, which must outlive the schema. A template because input::Schema is in
/// a higher module.
template <class Schema>
void add_keys(Schema& schema, Settings& parallel) {
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
           "between GPUs: true leaves NVLink multicast to NCCL; false turns it off, unless NCCL_NVLS_ENABLE is set")
      .free();
  schema
      .add(
          "parallel.blocks", parallel.blocks,
          "between GPUs: layers are exchanged in this many blocks, each while others are computed; 1 = without overlap")
      .at_least(1)
      .at_most(256)
      .free();
}

}  // namespace weft::parallel
