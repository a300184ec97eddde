// SPDX-License-Identifier: Apache-2.0
//
// Shared by the portable row-wise kernels of language models.
#pragma once

#include "kernels/portable.hpp"

namespace weft::kernels {

/// Rows that one team processes. On the host several: a short row takes less time than the start of a team.
#if defined(KOKKOS_ENABLE_CUDA)
constexpr int kRowsPerTeam = 1;
#else
constexpr int kRowsPerTeam = 16;
#endif

template <class Scratch, class Body>
struct RowsOfTeam {
  Body body;
  std::int64_t rows;

  KOKKOS_FUNCTION void operator()(const Team& team) const {
    Scratch& buffer = scratch<Scratch>(team);
    const std::int64_t begin = std::int64_t{team.league_rank()} * kRowsPerTeam;
    const std::int64_t end = begin + smaller(kRowsPerTeam, rows - begin);
    for (std::int64_t row = begin; row < end; ++row) body(team, buffer, row);
  }
};

/// Calls body(team, scratch, row) for every row; the contents of the team's `Scratch` are those that the row before
/// left.
template <class Scratch, class Body>
void for_rows(const Execution& execution, const char* name, std::int64_t rows, const Body& body) {
  for_teams(execution, name, (rows + kRowsPerTeam - 1) / kRowsPerTeam, sizeof(Scratch),
            RowsOfTeam<Scratch, Body>{body, rows});
}

}  // namespace weft::kernels
