// SPDX-License-Identifier: Apache-2.0
//
// The grids that a number of ranks can form: what each sends per step, and its memory. From sizes alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "language_model/blocks/model_parameters.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model {

struct GridPlan {
  std::int64_t tensor = 1, data = 1;
  std::int64_t bytes_sent = 0;    ///< per step, by the rank that sends most
  std::int64_t device_bytes = 0;  ///< of the rank that needs most
};

/// True if a step gathers weights in several micro-batches (parallel.shard = "full"), with memory for two blocks.
bool gathers_repeatedly(const Configuration&);

/// Bytes that the last rank of the grid of a configuration, whose parts are the largest, sends per step. Of
/// activations, a rank sends 2 R C (T - 1) / T elements per sum of R rows on T ranks; of a matrix, (D - 1) / D of its
/// fp32 gradient and of its weights on D ranks, as often as parallel.shard says.
std::int64_t bytes_sent(const Configuration&, const Architecture&);

/// Every grid of parallel.data * parallel.tensor ranks that can train the model, by the size of the tensor axis.
std::vector<GridPlan> grid_plans(const Configuration&, const Architecture&);

/// A table for the plan, with the grid of this run, those that need more than device.memory, where that is given, and
/// the one of the others that sends least; "" if there is only one grid.
std::string grids_text(const Configuration&, const Architecture&);

}  // namespace weft::language_model
