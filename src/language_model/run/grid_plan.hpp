// SPDX-License-Identifier: Apache-2.0
//
// How a number of ranks can divide a training run (tensor axis x data axis, and what ranks of the data axis divide):
// bytes sent, memory and expected time of each way, and the choice among them. From sizes alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "language_model/run/memory_plan.hpp"

namespace weft::language_model {

/// A way to divide the run, with the micro-batches that fit.
struct GridPlan {
  std::int64_t tensor = 1, data = 1;
  parallel::Shard shard = parallel::Shard::state;
  std::int64_t micro_tokens = 0, gathered_blocks = 0;  ///< as in Configuration
  std::int64_t bytes_sent = 0;                         ///< per step, by the rank that sends most
  double seconds = 0;                                  ///< expected, of a step (expected_seconds)
  bool fits = true;
  Plan plan = {};

  void apply_to(Configuration&) const;
};

/// What a choice depends on beside the input.
struct GridChoice {
  Architecture architecture;
  std::function<Plan(const Configuration&)> plan_of;  ///< of the whole run
  std::int64_t node_ranks = 1;
  MemoryLimits limits = {};

  /// The grid and the division of a configuration: with data.micro_tokens, or with the largest micro-batches that fit
  /// if that is 0; weights are gathered once per step if there is memory for them.
  GridPlan given(const Configuration&) const;
  /// Every way in which parallel.data * parallel.tensor ranks can train the model, by the size of the tensor axis,
  /// which is at most a node.
  std::vector<GridPlan> all(const Configuration&) const;
  /// The fastest of those that fit; of none, the one with the least memory.
  static const GridPlan& best(const std::vector<GridPlan>&);
};

/// Bytes that the last rank of the grid of a configuration, whose parts are the largest, sends per step. Of
/// activations, a rank sends 2 R C (T - 1) / T elements per sum of R rows on T ranks; of a matrix, (D - 1) / D of its
/// fp32 gradient and of its weights on D ranks, as often as parallel.shard says.
std::int64_t bytes_sent(const Configuration&, const Architecture&);

/// Expected seconds of a training step, to compare grids: the work of a rank and the sums of its tensor axis, or the
/// exchanges of its data axis, which computation hides, whichever takes longer. Without the update. H100 or H200:
/// half of the peak of products, 3 TB/s of memory for the sums of gradients over micro-batches, 300 GB/s per rank
/// within a node, 40 GB/s per rank between nodes.
double expected_seconds(const Configuration&, const Architecture&, std::int64_t node_ranks);

/// A table for the log: the plans, with that of this run; "" if there is only one grid.
std::string grids_text(const std::vector<GridPlan>&, const Configuration&);

}  // namespace weft::language_model
