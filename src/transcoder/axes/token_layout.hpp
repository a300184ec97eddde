// SPDX-License-Identifier: Apache-2.0
//
// Which rank has which tokens of a batch. A batch of N tokens is cut over the data axis into groups and each group over
// the feature axis into own slices (parallel/grid.hpp). Each rank provides the inputs of its own slice and gathers
// those of its group; it forms the residual of its own slice only.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/grid.hpp"

namespace weft::transcoder {

struct TokenLayout {
  TokenLayout(std::int64_t total, const parallel::Grid& grid);

  std::int64_t total;
  parallel::Range group;                     ///< of the batch: tokens this rank's feature group works on
  parallel::Range own;                       ///< of the group: tokens whose residual this rank forms
  std::vector<parallel::Range> own_of_rank;  ///< of the group, by feature rank
};

}  // namespace weft::transcoder
