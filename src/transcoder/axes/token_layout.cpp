// SPDX-License-Identifier: Apache-2.0
#include "transcoder/axes/token_layout.hpp"

namespace weft::transcoder {

TokenLayout::TokenLayout(std::int64_t total_tokens, const parallel::Grid& grid)
    : total(total_tokens), group(grid.part(parallel::kDataAxis, total_tokens)) {
  for (std::int64_t g = 0; g < grid.size(parallel::kFeatureAxis); ++g)
    own_of_rank.push_back(parallel::part(group.size(), grid.size(parallel::kFeatureAxis), g));
  own = own_of_rank[static_cast<std::size_t>(grid.index(parallel::kFeatureAxis))];
}

}  // namespace weft::transcoder
