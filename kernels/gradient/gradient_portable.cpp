// SPDX-License-Identifier: Apache-2.0
#include "kernels/gradient/gradient.hpp"
#include "kernels/gradient/rows_by_id.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels::portable {
namespace {

struct ColumnScratch {
  float total[kChunkColumns], x[kChunkColumns], g[kChunkColumns];
};

KOKKOS_FORCEINLINE_FUNCTION std::int64_t chunks_of(std::int64_t columns) {
  return (columns + kChunkColumns - 1) / kChunkColumns;
}

/// sums[b, j] = sum over the rows n of block b of (x[n, j] - shift[n]) * scale[n] * g[n, j], without x of g[n, j]; then
/// out[j] (+)= sum over b.
void add_columns(const Execution& execution, const char* name, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                 Array<const float> scale, Array<float> out, bool overwrite, Array<std::byte> workspace) {
  const std::int64_t blocks = row_sums(g.rows), chunks = chunks_of(g.columns);
  const Matrix<float> sums{reinterpret_cast<float*>(workspace.data), blocks, g.columns, g.columns};
  for_teams(
      execution, name, blocks * chunks, sizeof(ColumnScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t block = team.league_rank() / chunks, column = team.league_rank() % chunks * kChunkColumns;
        const int count = smaller(kChunkColumns, g.columns - column);
        ColumnScratch& buffer = scratch<ColumnScratch>(team);
        for_columns(team, count, [&](int c) { buffer.total[c] = 0.0f; });
        const std::int64_t end = smaller((block + 1) * kRowsPerSum, g.rows);
        for (std::int64_t n = block * kRowsPerSum; n < end; ++n) {
          const float* gradient = row_chunk(team, g, n, column, count, buffer.g);
          if (x.data == nullptr) {
            for_columns(team, count, [&](int c) { buffer.total[c] += gradient[c]; });
          } else {
            const float* value = row_chunk(team, x, n, column, count, buffer.x);
            const float less = shift.data == nullptr ? 0.0f : shift[n], times = scale.data == nullptr ? 1.0f : scale[n];
            for_columns(team, count, [&](int c) { buffer.total[c] += (value[c] - less) * times * gradient[c]; });
          }
        }
        for_columns(team, count, [&](int c) { sums(block, column + c) = buffer.total[c]; });
      });
  for_teams(
      execution, name, chunks, sizeof(ColumnScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t column = team.league_rank() * std::int64_t{kChunkColumns};
        const int count = smaller(kChunkColumns, sums.columns - column);
        ColumnScratch& buffer = scratch<ColumnScratch>(team);
        for_columns(team, count, [&](int c) { buffer.total[c] = 0.0f; });
        for (std::int64_t block = 0; block < blocks; ++block) {
          const float* part = sums.row(block) + column;
          for_columns(team, count, [&](int c) { buffer.total[c] += part[c]; });
        }
        if (overwrite)
          for_columns(team, count, [&](int c) { out[column + c] = buffer.total[c]; });
        else
          for_columns(team, count, [&](int c) { out[column + c] += buffer.total[c]; });
      });
}

}  // namespace

/// Sorts `w.from` by id (step 1 of rows_by_id.hpp); a block has one thread.
void sort_rows_by_id(const Execution& execution, RowsByIdWorkspace& w, std::int64_t largest_id) {
  const std::int64_t n = w.from.size, blocks = (n + kSortBlock - 1) / kSortBlock;
  for (int pass = 0; pass < sort_passes(largest_id); ++pass) {
    const Array<SortedRow> from = w.from, to = w.to;
    const Array<std::int32_t> places = w.places;
    for_teams(
        execution, "count_digits", blocks, kDigits * sizeof(std::int32_t), KOKKOS_LAMBDA(const Team& team) {
          auto& count = scratch<std::int32_t[kDigits]>(team);
          const std::int64_t block = team.league_rank(), end = smaller((block + 1) * kSortBlock, n);
          once(team, [&] {
            for (int digit = 0; digit < kDigits; ++digit) count[digit] = 0;
            for (std::int64_t i = block * kSortBlock; i < end; ++i) ++count[digit_of(from[i].id, pass)];
            for (int digit = 0; digit < kDigits; ++digit) places[digit * blocks + block] = count[digit];
          });
        });
    Kokkos::parallel_scan(
        "places", Kokkos::RangePolicy<Space>(space_of(execution), 0, kDigits * blocks),
        KOKKOS_LAMBDA(std::int64_t i, std::int32_t & sum, bool last) {
          const std::int32_t count = places[i];
          if (last) places[i] = sum;
          sum += count;
        });
    for_teams(
        execution, "move_rows", blocks, kDigits * sizeof(std::int32_t), KOKKOS_LAMBDA(const Team& team) {
          auto& place = scratch<std::int32_t[kDigits]>(team);
          const std::int64_t block = team.league_rank(), end = smaller((block + 1) * kSortBlock, n);
          once(team, [&] {
            for (int digit = 0; digit < kDigits; ++digit) place[digit] = places[digit * blocks + block];
            for (std::int64_t i = block * kSortBlock; i < end; ++i) to[place[digit_of(from[i].id, pass)]++] = from[i];
          });
        });
    std::swap(w.from, w.to);
  }
}

void add_column_sums(const Execution& execution, AnyMatrix g, Array<float> out, bool overwrite,
                     Array<std::byte> workspace) {
  add_columns(execution, "add_column_sums", {}, g, {}, {}, out, overwrite, workspace);
}

void add_column_products(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                         Array<const float> scale, Array<float> out, bool overwrite, Array<std::byte> workspace) {
  add_columns(execution, "add_column_products", x, g, shift, scale, out, overwrite, workspace);
}

void add_rows_by_id(const Execution& execution, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                    Matrix<float> out, Array<std::byte> workspace) {
  const std::int64_t n = ids.size, blocks = row_sums(n), chunks = chunks_of(out.columns);
  RowsByIdWorkspace w = rows_by_id_layout(workspace.data, n, out.columns);
  const Array<SortedRow> rows = w.from;
  for_all(
      execution, "table_rows", n, KOKKOS_LAMBDA(std::int64_t i) {
        rows[i] = {table_row(ids[i], first_row, out.rows), static_cast<std::uint32_t>(i)};
      });
  portable::sort_rows_by_id(execution, w, out.rows);

  const Array<const SortedRow> sorted = w.from;
  const Matrix<float> leading{w.leading.data, blocks, out.columns, out.columns},
      inner{w.inner.data, blocks, out.columns, out.columns};
  for_teams(
      execution, "sum_segments", blocks * chunks, sizeof(ColumnScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t block = team.league_rank() / chunks, column = team.league_rank() % chunks * kChunkColumns;
        const int count = smaller(kChunkColumns, out.columns - column);
        const std::int64_t block_begin = block * kRowsPerSum, block_end = smaller(block_begin + kRowsPerSum, n);
        ColumnScratch& buffer = scratch<ColumnScratch>(team);
        std::int64_t begin = run_begin(sorted, block_begin), i = next_segment(begin, block_begin);
        if (!same_run(sorted, begin, i)) {  // no segment of the run that began in an earlier block begins in this one
          for (i = block_begin; i < block_end && same_run(sorted, begin, i);) ++i;
          begin = i;
        }
        while (i < block_end) {
          const std::uint32_t id = sorted[i].id;
          if (id == out.rows) return;  // ids of other ranks come last
          const std::int64_t segment = i;
          for_columns(team, count, [&](int c) { buffer.total[c] = 0.0f; });
          for (; i < segment + kRowsPerSum && same_run(sorted, segment, i); ++i) {
            if (i + 1 < n) prefetch_chunk(g, sorted[i + 1].row, column, count);
            const float* gradient = row_chunk(team, g, sorted[i].row, column, count, buffer.g);
            for_columns(team, count, [&](int c) { buffer.total[c] += gradient[c]; });
          }
          if (segment > begin)
            for_columns(team, count, [&](int c) { inner(block, column + c) = buffer.total[c]; });
          else if (same_run(sorted, segment, i))
            for_columns(team, count, [&](int c) { leading(block, column + c) = buffer.total[c]; });
          else
            for_columns(team, count, [&](int c) { out(id, column + c) += buffer.total[c]; });
          if (!same_run(sorted, segment, i)) begin = i;
        }
      });
  for_teams(
      execution, "sum_runs", blocks * chunks, sizeof(ColumnScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t block = team.league_rank() / chunks, column = team.league_rank() % chunks * kChunkColumns;
        const int count = smaller(kChunkColumns, out.columns - column);
        const std::int64_t block_begin = block * kRowsPerSum, last = smaller(block_begin + kRowsPerSum, n) - 1;
        const std::int64_t begin = run_begin(sorted, last);
        const std::uint32_t id = sorted[last].id;
        if (id == out.rows || begin < block_begin || !same_run(sorted, begin, begin + kRowsPerSum)) return;
        ColumnScratch& buffer = scratch<ColumnScratch>(team);
        for_columns(team, count, [&](int c) { buffer.total[c] = leading(block, column + c); });
        for (std::int64_t k = 1; same_run(sorted, begin, begin + k * kRowsPerSum); ++k)
          for_columns(team, count, [&](int c) { buffer.total[c] += inner(block + k, column + c); });
        for_columns(team, count, [&](int c) { out(id, column + c) += buffer.total[c]; });
      });
}

}  // namespace weft::kernels::portable
