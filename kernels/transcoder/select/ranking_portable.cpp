// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/transcoder/select/ranking.hpp"

namespace weft::kernels {
namespace {

struct RankScratch {
  float value[kChunkColumns];
};

}  // namespace

void rank_tile(const Execution& execution, AnyMatrix product, Array<const float> bias, Array<const float> norm) {
  for_teams(
      execution, "rank_tile", product.rows, sizeof(RankScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        RankScratch& buffer = scratch<RankScratch>(team);
        for_chunks(product.columns, product.columns, [&](std::int64_t column, int count) {
          const float* p = row_chunk(team, product, row, column, count, buffer.value);
          store_chunk(team, product, row, column, count, [&](int c) {
            const float z = p[c] + bias[column + c];
            return z < 0.0f ? 0.0f : z * norm[column + c];
          });
        });
      });
}

void unrank(const Execution& execution, const SparseActivations& activations, Array<const float> norm) {
  const SparseActivations a = activations;
  for_all(
      execution, "unrank", a.key.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (i < a.row_offsets[a.n_tokens]) a.value[i] /= norm[a.key[i]];
      });
}

}  // namespace weft::kernels
