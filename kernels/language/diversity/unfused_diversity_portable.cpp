// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/diversity/unfused_diversity.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels {
namespace {

struct NoScratch {};

/// Sum over one row, of any length.
template <class Term>
KOKKOS_FORCEINLINE_FUNCTION float row_sum(const Team& team, std::int64_t columns, const Term& term) {
  float sum = 0;
  for_chunks(columns, columns, [&](std::int64_t column, int count) {
    sum += sum_columns<float>(team, count, [&](int c) { return term(column + c); });
  });
  return sum;
}

}  // namespace

void unfused_diversity(const Execution& execution, std::int64_t prompts, Matrix<const float> embeddings,
                       Array<float> workspace, Array<float> out) {
  const std::int64_t columns = embeddings.columns, rows = embeddings.rows, samples = rows / prompts,
                     pairs = rows * samples;
  float* const normalised = workspace.data;
  float* const difference = normalised + rows * columns;
  float* const distance = difference + pairs * columns;
  for_rows<NoScratch>(
      execution, "normalise embeddings", rows, KOKKOS_LAMBDA(const Team& team, NoScratch&, std::int64_t row) {
        const float* const e = embeddings.row(row);
        const float inverse =
            1 / Kokkos::sqrt(row_sum(team, columns, [&](std::int64_t column) { return e[column] * e[column]; }));
        for_chunks(columns, columns, [&](std::int64_t column, int count) {
          for_columns(team, count, [&](int c) { normalised[row * columns + column + c] = inverse * e[column + c]; });
        });
      });
  for_all(
      execution, "differences of embeddings", pairs * columns, KOKKOS_LAMBDA(std::int64_t element) {
        const std::int64_t pair = element / columns, column = element % columns, i = pair / samples,
                           j = i / samples * samples + pair % samples;
        difference[element] = normalised[i * columns + column] - normalised[j * columns + column];
      });
  for_rows<NoScratch>(
      execution, "distances", pairs, KOKKOS_LAMBDA(const Team& team, NoScratch&, std::int64_t pair) {
        const float* const d = difference + pair * columns;
        const float sum = row_sum(team, columns, [&](std::int64_t column) { return d[column] * d[column]; });
        once(team, [&] { distance[pair] = sum / 2; });
      });
  for_rows<NoScratch>(
      execution, "mean distance", prompts, KOKKOS_LAMBDA(const Team& team, NoScratch&, std::int64_t prompt) {
        const float* const d = distance + prompt * samples * samples;
        const float sum = row_sum(team, samples * samples, [&](std::int64_t pair) { return d[pair]; });
        once(team, [&] { out[prompt] = sum / static_cast<float>(samples * (samples - 1)); });
      });
}

}  // namespace weft::kernels
