// SPDX-License-Identifier: Apache-2.0
//
// Sums of the rows of a lookup that have the same id in the same example. Rows are sorted by (example, id); a team sums
// each run of equal ones.
#include <string>

#include "base/error.hpp"
#include "kernels/gradient/rows_by_id.hpp"
#include "kernels/portable.hpp"
#include "kernels/privacy/clipped_sums.hpp"
#include "kernels/privacy/norms.hpp"
#include "kernels/privacy/products.hpp"

namespace weft::kernels {
namespace {

struct RunScratch {
  float total[kChunkColumns], block[kChunkColumns], g[kChunkColumns];
};

/// Row of a table of an example: ids of other ranks have the row `table_rows`.
struct LookupKey {
  std::int64_t table_rows;

  KOKKOS_FORCEINLINE_FUNCTION std::int64_t example(std::uint32_t key) const { return key / (table_rows + 1); }
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t row(std::uint32_t key) const { return key % (table_rows + 1); }
};

/// The rows of all examples, sorted. Rows of example e stay within the offsets of the example.
Array<const SortedRow> sort_lookup(const Execution& execution, Array<const std::uint32_t> ids, std::int64_t first_row,
                                   std::int64_t table_rows, const Examples& examples, RowsByIdWorkspace& work) {
  const std::int64_t keys = examples.count() * (table_rows + 1), begin = examples.offsets.front();
  if (keys >= std::int64_t{1} << 32)
    throw Error(ExitCode::internal, std::to_string(examples.count()) + " examples of a table of " +
                                        std::to_string(table_rows) + " rows are too many (2^32 or more together)");
  const Array<SortedRow> rows = work.from;
  const Array<const std::int64_t> offsets = examples.device_offsets;
  for_all(
      execution, "lookup_keys", rows.size, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t example = example_of(offsets, begin + i);
        rows[i] = {
            static_cast<std::uint32_t>(example * (table_rows + 1)) + table_row(ids[begin + i], first_row, table_rows),
            static_cast<std::uint32_t>(begin + i)};
      });
  sort_rows_by_id(execution, work, keys);
  return work.from;
}

std::int64_t chunks_of(std::int64_t columns) { return (columns + kChunkColumns - 1) / kChunkColumns; }

/// Calls body(team, run, key, column, count, sums of columns [column, column + count)) for every run, at its first row.
/// A team has a chunk of the columns: runs may be long.
template <class Body>
struct Runs {
  Array<const SortedRow> sorted;
  AnyMatrix g;
  LookupKey key;
  std::int64_t chunks;
  Body body;

  KOKKOS_FUNCTION void operator()(const Team& team) const {
    const std::int64_t first = team.league_rank() / chunks, column = team.league_rank() % chunks * kChunkColumns;
    const std::uint32_t id = sorted[first].id;
    if (first > 0 && sorted[first - 1].id == id) return;
    if (key.row(id) == key.table_rows) return;
    RunScratch& buffer = scratch<RunScratch>(team);
    const int count = smaller(kChunkColumns, g.columns - column);
    for_columns(team, count, [&](int c) { buffer.total[c] = 0.0f; });
    for (std::int64_t i = first; same_run(sorted, first, i);) {
      for_columns(team, count, [&](int c) { buffer.block[c] = 0.0f; });
      for (const std::int64_t end = i + kRowsPerSum; i < end && same_run(sorted, first, i); ++i) {
        const float* gradient = row_chunk(team, g, sorted[i].row, column, count, buffer.g);
        for_columns(team, count, [&](int c) { buffer.block[c] += gradient[c]; });
      }
      for_columns(team, count, [&](int c) { buffer.total[c] += buffer.block[c]; });
    }
    body(team, first, id, column, count, buffer.total);
  }
};

template <class Body>
void for_runs(const Execution& execution, const char* name, Array<const SortedRow> sorted, AnyMatrix g, LookupKey key,
              const Body& body) {
  const std::int64_t chunks = chunks_of(g.columns);
  for_teams(execution, name, sorted.size * chunks, sizeof(RunScratch), Runs<Body>{sorted, g, key, chunks, body});
}

struct LookupNorms {
  RowsByIdWorkspace sort;
  Array<double> squares;  ///< [rows]: of the run that begins there, and of its chunks [rows, chunks]
  Array<double> of_chunks;
  std::int64_t bytes = 0;
};

LookupNorms lookup_layout(std::byte* data, std::int64_t rows, std::int64_t columns) {
  LookupNorms work;
  work.sort = rows_by_id_layout(data, rows, 0);
  Workspace rest(data == nullptr ? nullptr : data + work.sort.bytes);
  work.squares = rest.take<double>(rows);
  work.of_chunks = rest.take<double>(rows * chunks_of(columns));
  work.bytes = work.sort.bytes + rest.bytes();
  return work;
}

}  // namespace

std::int64_t lookup_norms_workspace(std::int64_t columns, const ExampleSizes& sizes) {
  return lookup_layout(nullptr, sizes.rows, columns).bytes;
}

void add_lookup_norms(const Execution& execution, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                      std::int64_t table_rows, const Examples& examples, Array<double> norms,
                      Array<std::byte> workspace) {
  const std::int64_t rows = sizes_of(examples).rows;
  LookupNorms work = lookup_layout(workspace.data, rows, g.columns);
  require_examples(examples, norms.size, work.bytes, workspace, "norms of a lookup");
  if (rows == 0) return;
  const Array<const SortedRow> sorted = sort_lookup(execution, ids, first_row, table_rows, examples, work.sort);
  const Array<double> squares = work.squares, of_chunks = work.of_chunks;
  const std::int64_t chunks = chunks_of(g.columns);
  for_all(
      execution, "clear", rows * chunks, KOKKOS_LAMBDA(std::int64_t i) { of_chunks[i] = 0; });
  for_runs(
      execution, "lookup_squares", sorted, g, {table_rows},
      KOKKOS_LAMBDA(const Team& team, std::int64_t run, std::uint32_t, std::int64_t column, int count,
                    const float* sums) {
        team.team_barrier();
        const double sum = sum_columns<double>(
            team, count, [&](int c) { return static_cast<double>(sums[c]) * static_cast<double>(sums[c]); });
        once(team, [&] { of_chunks[run * chunks + column / kChunkColumns] = sum; });
      });
  for_all(
      execution, "sum_chunks", rows, KOKKOS_LAMBDA(std::int64_t i) {
        squares[i] = 0;
        for (std::int64_t c = 0; c < chunks; ++c) squares[i] += of_chunks[i * chunks + c];
      });
  add_row_values(execution, squares, examples.device_offsets, examples.offsets.front(), 1, norms);
}

std::int64_t lookup_to_examples_workspace(const ExampleSizes& sizes) {
  return rows_by_id_layout(nullptr, sizes.rows, 0).bytes;
}

void add_lookup_to_examples(const Execution& execution, Array<const std::uint32_t> ids, AnyMatrix g,
                            std::int64_t first_row, const Examples& examples, Matrix<bf16> stored,
                            Array<std::byte> workspace) {
  const std::int64_t rows = sizes_of(examples).rows, columns = g.columns;
  RowsByIdWorkspace work = rows_by_id_layout(workspace.data, rows, 0);
  require_examples(examples, stored.rows, work.bytes, workspace, "stored gradients of a lookup");
  if (rows == 0 || columns == 0) return;
  const LookupKey key{stored.columns / columns};
  const Array<const SortedRow> sorted = sort_lookup(execution, ids, first_row, key.table_rows, examples, work);
  for_runs(
      execution, "add_lookup_to_examples", sorted, g, key,
      KOKKOS_LAMBDA(const Team& team, std::int64_t, std::uint32_t id, std::int64_t column, int count,
                    const float* sums) {
        bf16* to = stored.row(key.example(id)) + key.row(id) * columns + column;
        for_columns(team, count, [&](int c) { to[c] = to_bf16(float{to[c]} + sums[c]); });
      });
}

}  // namespace weft::kernels
