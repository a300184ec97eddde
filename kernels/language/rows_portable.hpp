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

/// body(team, scratch, row) for every row; the contents of the team's `Scratch` are those that the row before left.
template <class Scratch, class Body>
void for_rows(const Execution& execution, const char* name, std::int64_t rows, const Body& body) {
  for_teams(execution, name, (rows + kRowsPerTeam - 1) / kRowsPerTeam, sizeof(Scratch),
            RowsOfTeam<Scratch, Body>{body, rows});
}

/// Largest of value(c) over c in [0, count), the same on every lane; `least` without columns. NaN is ignored.
template <class Value>
KOKKOS_FORCEINLINE_FUNCTION float largest_column(const Team& team, int count, float least, const Value& value) {
#ifdef __CUDA_ARCH__
  float largest = least;
  Kokkos::parallel_reduce(
      Kokkos::ThreadVectorRange(team, count),
      [&](int c, float& partial) {
        const float x = value(c);
        partial = x > partial ? x : partial;
      },
      Kokkos::Max<float>(largest));
  return largest > least ? largest : least;
#else
  static_cast<void>(team);
  float lane[16];
  for (int i = 0; i < 16; ++i) lane[i] = least;
  int c = 0;
  for (; c + 16 <= count; c += 16)
    for (int i = 0; i < 16; ++i) {
      const float x = value(c + i);
      lane[i] = x > lane[i] ? x : lane[i];
    }
  for (int i = 0; c < count; ++c, ++i) {
    const float x = value(c);
    lane[i] = x > lane[i] ? x : lane[i];
  }
  for (int i = 1; i < 16; ++i) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
  return lane[0];
#endif
}

}  // namespace weft::kernels
