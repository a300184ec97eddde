// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "parallel/grid.hpp"

namespace weft::testing {

/// The grid of `ranks` with this shape. Cases share that of all ranks until MPI ends, as the steps of a training do:
/// to connect GPUs anew takes most of a second. Collective.
std::shared_ptr<const parallel::Grid> shared_grid(const parallel::Communicator& ranks,
                                                  const parallel::GridShape& shape);

}  // namespace weft::testing
