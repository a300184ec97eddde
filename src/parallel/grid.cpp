// SPDX-License-Identifier: Apache-2.0
#include "parallel/grid.hpp"

namespace weft::parallel {

GridShape grid_shape(std::int64_t data, std::int64_t feature, std::int64_t world) {
  if (feature == 0 && data > 0 && world % data == 0) feature = world / data;
  if (feature == 0)
    throw collective_error(
        ExitCode::usage,
        "parallel.data = {} does not divide the {} rank{} of this job (each feature group has as many ranks); start "
        "a multiple of {} ranks or change parallel.data",
        data, world, world == 1 ? "" : "s", data);
  if (data < 1 || feature < 1 || data * feature != world)
    throw collective_error(
        ExitCode::usage,
        "parallel.data = {} times parallel.feature = {} is not the {} rank{} of this job (each rank has one place "
        "in the grid); start {} ranks or change the grid",
        data, feature, world, world == 1 ? "" : "s", data * feature);
  return {data, feature};
}

Grid::Grid(const Communicator& ranks, GridShape shape)
    : shape_(shape),
      world_(ranks.duplicate()),
      feature_axis_(ranks.split(static_cast<int>(ranks.rank() / shape.feature), ranks.rank())),
      data_axis_(ranks.split(static_cast<int>(ranks.rank() % shape.feature), ranks.rank())) {}

}  // namespace weft::parallel
