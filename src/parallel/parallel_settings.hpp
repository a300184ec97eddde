// SPDX-License-Identifier: Apache-2.0
//
// Table [parallel]: the process grid, and how ranks exchange.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "input/schema.hpp"
#include "parallel/device_communicator.hpp"

namespace weft::parallel {

/// What ranks of the data axis divide among them (ZeRO stages 1 to 3; Rajbhandari et al. 2020, arXiv 1910.02054): the
/// state of the optimizer; gradients as well; all, with the weights.
enum class Shard { state, gradients, full };
inline constexpr std::pair<std::string_view, Shard> kShards[] = {
    {"state", Shard::state}, {"gradients", Shard::gradients}, {"full", Shard::full}};

/// Who divides a model over the ranks: the keys of the table, or the program, from sizes and memory.
enum class Division { given, automatic };

/// Table [parallel].
struct Settings {
  std::int64_t feature = 0;  ///< 0 = all ranks divided by `data`
  std::int64_t data = 1;
  std::int64_t tensor = 1;          ///< language models: ranks that share every matrix
  Shard shard = Shard::state;       ///< language models
  Division plan = Division::given;  ///< language models
  double timeout = 600;             ///< seconds without progress of any rank before the job ends; 0 = never
  std::int64_t world = 0;           ///< plan for this many ranks; dry run only
  std::int64_t node = 8;            ///< ranks of a node, of a plan for `world` ranks
  bool nvls = false;                ///< NCCL may use NVLink multicast
  std::int64_t blocks = 4;          ///< blocks of layers whose exchanges overlap with computation; 1: no overlap
  /// shard = "full", no key: blocks whose gathered weights are in memory at a time. Those of one arrive while another
  /// is computed; with memory for all blocks they are gathered once per step.
  std::int64_t gathered_blocks = 2;
  // No keys: a benchmark compares training with other implementations.
  bool overlap = true;  ///< language models: exchanges overlap with computation
  ExchangeStrategy exchange;
};

/// The ranks of the grid: parallel.world in a dry run, else those of the job. Throws a collective Error(usage) if
/// parallel.world is given in another run.
std::int64_t ranks_of_grid(const Settings&, std::int64_t n_ranks, bool dry_run);

/// Single keys, for models that have not all of the table: parallel.timeout, since every run has a watchdog, and
/// parallel.world of models with a grid.
void add_timeout_key(input::Schema&, Settings&);
void add_world_key(input::Schema&, Settings&);

/// The keys of the table, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, Settings&);

}  // namespace weft::parallel
