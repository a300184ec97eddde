// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/linear/linear.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {

void round_copies(const Execution& execution, Array<const RoundedCopy> copies, std::int64_t largest) {
  const std::int64_t chunks = (largest + kChunkColumns - 1) / kChunkColumns;
  for_teams(
      execution, "round_copies", copies.size * chunks, 0, KOKKOS_LAMBDA(const Team& team) {
        const RoundedCopy& copy = copies[team.league_rank() / chunks];
        const std::int64_t begin = team.league_rank() % chunks * kChunkColumns;
        if (begin >= copy.size) return;
        for_columns(team, smaller(kChunkColumns, copy.size - begin),
                    [&](int c) { copy.to[begin + c] = to_bf16(copy.from[begin + c]); });
      });
}

}  // namespace weft::kernels
