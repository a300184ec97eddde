// SPDX-License-Identifier: Apache-2.0
//
// Assignment of the tokens of a batch to ranks. A batch of N tokens is cut over the data axis into groups and each
// group over the feature axis into own slices (parallel/grid.hpp). Each rank provides the inputs of its own slice and
// gathers those of its group; it forms the residual of its own slice only.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/grid.hpp"

namespace weft::transcoder {

struct TokenLayout {
  TokenLayout(std::int64_t total, const parallel::Grid& grid);

  std::int64_t total;
  parallel::Range group;                     ///< tokens of the batch on which this rank's feature group works
  parallel::Range own;                       ///< tokens of the group whose residual this rank forms
  std::vector<parallel::Range> own_of_rank;  ///< `own` of each feature rank of the group
};

}  // namespace weft::transcoder
