// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/embedding/dropout.hpp"
#include "kernels/language/embedding/embedding.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels::portable {
namespace {

struct EmbeddingScratch {
  float token[kChunkColumns], position[kChunkColumns];
};
struct DropoutScratch {
  float x[kChunkColumns], factor[kChunkColumns];
};
static_assert(kChunkColumns % kColumnsPerMask == 0);

}  // namespace

void embed(const Execution& execution, AnyMatrix tokens, std::int64_t first_id, Array<const std::uint32_t> ids,
           AnyMatrix positions, Array<const std::int32_t> position, AnyMatrix out) {
  for_rows<EmbeddingScratch>(
      execution, "embed", out.rows, KOKKOS_LAMBDA(const Team& team, EmbeddingScratch& buffer, std::int64_t row) {
        const std::int64_t id = static_cast<std::int64_t>(ids[row]) - first_id;
        const bool here = id >= 0 && id < tokens.rows;
        for_chunks(out.columns, out.columns, [&](std::int64_t column, int count) {
          const float* token = buffer.token;
          if (here)
            token = row_chunk(team, tokens, id, column, count, buffer.token);
          else
            for_columns(team, count, [&](int c) { buffer.token[c] = 0.0f; });
          if (positions.data == nullptr) {
            store_chunk(team, out, row, column, count, [&](int c) { return token[c]; });
          } else {
            const float* place = row_chunk(team, positions, position[row], column, count, buffer.position);
            store_chunk(team, out, row, column, count, [&](int c) { return token[c] + place[c]; });
          }
        });
      });
}

void dropout(const Execution& execution, const DropoutSite& site, const AdamStep* step, AnyMatrix x) {
  const DropoutRule rule = dropout_rule(site.probability);
  if (rule.kept == kMaskRange) return;
  const DropoutSite s = site;
  for_rows<DropoutScratch>(
      execution, "dropout", x.rows, KOKKOS_LAMBDA(const Team& team, DropoutScratch& buffer, std::int64_t row) {
        const std::uint64_t seed = step->seed, number = step->step;
        for_chunks(x.columns, x.columns, [&](std::int64_t column, int count) {
          for_columns(team, (count + kColumnsPerMask - 1) / kColumnsPerMask, [&](int group) {
            const Random4 random =
                dropout_bits(seed, number, s.site, s.first_row + row, column / kColumnsPerMask + group);
            for (int i = 0; i < kColumnsPerMask; ++i)
              buffer.factor[group * kColumnsPerMask + i] = dropout_factor(rule, random, i);
          });
          team.team_barrier();
          const float* value = row_chunk(team, x, row, column, count, buffer.x);
          store_chunk(team, x, row, column, count, [&](int c) { return buffer.factor[c] * value[c]; });
          team.team_barrier();
        });
      });
}

}  // namespace weft::kernels::portable
