// SPDX-License-Identifier: Apache-2.0
//
// The steps of add_rows_by_id that its portable and CUDA implementations share: workspace, digits of the radix sort,
// and which team adds which part of a run of equal ids.
//
// 1. Rows are sorted by id, equal ids in ascending order of n: least significant digit first, 8 bits at a time. Each
//    pass counts the digits of blocks of kSortBlock rows, turns the counts into places, and moves the rows.
// 2. A run of equal ids is cut into segments of kRowsPerSum rows, counted from its start: its sum does not depend on
//    the other ids, so a rank that holds a part of the table has the same bits. The segments that begin within a block
//    of kRowsPerSum sorted rows are summed together. The only segment of a run is added to `out`. Of longer runs at
//    most two segments begin within a block: one of a run that comes from a block before (`inner`), and the first of
//    the block's last run (`leading`).
// 3. The block in which a longer run begins adds its segments in order.
#pragma once

#include "kernels/dispatch.hpp"
#include "kernels/gradient/row_sums.hpp"
#include "kernels/workspace.hpp"

namespace weft::kernels {

constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
constexpr std::int64_t kSortBlock = 1024;

/// A row of the gradient and its row of the table (`table_row`).
struct SortedRow {
  std::uint32_t id;
  std::uint32_t row;
};

struct RowsByIdWorkspace {
  Array<SortedRow> from, to;    ///< [n] each: read and written by a pass, then swapped
  Array<std::int32_t> places;   ///< [kDigits, blocks]: counts, then first places
  Array<float> leading, inner;  ///< [row_sums(n), columns] each: sums of segments
  std::int64_t bytes = 0;
};

inline RowsByIdWorkspace rows_by_id_layout(std::byte* data, std::int64_t n, std::int64_t columns) {
  Workspace workspace(data);
  RowsByIdWorkspace out;
  out.from = workspace.take<SortedRow>(n);
  out.to = workspace.take<SortedRow>(n);
  out.places = workspace.take<std::int32_t>(kDigits * ((n + kSortBlock - 1) / kSortBlock));
  out.leading = workspace.take<float>(row_sums(n) * columns);
  out.inner = workspace.take<float>(row_sums(n) * columns);
  out.bytes = workspace.bytes();
  return out;
}

/// Step 1: sorts work.from, whose ids are at most `largest_id`, by id. Uses work.to and work.places.
WEFT_KERNEL(sort_rows_by_id, void(const Execution&, RowsByIdWorkspace& work, std::int64_t largest_id));

/// Row of a table of `rows` rows that an id means, or `rows` if another rank has it.
WEFT_HOST_DEVICE inline std::uint32_t table_row(std::uint32_t id, std::int64_t first_row, std::int64_t rows) {
  const std::int64_t row = static_cast<std::int64_t>(id) - first_row;
  return static_cast<std::uint32_t>(row < 0 || row >= rows ? rows : row);
}

/// Passes of the sort: table rows and the one for other ranks have this many digits.
constexpr int sort_passes(std::int64_t rows) {
  int passes = 0;
  for (; rows > 0; rows >>= kDigitBits) ++passes;
  return passes;
}

WEFT_HOST_DEVICE inline int digit_of(std::uint32_t id, int pass) {
  return static_cast<int>(id >> (pass * kDigitBits)) & (kDigits - 1);
}

/// First of the sorted rows with the id of row `at`.
WEFT_HOST_DEVICE inline std::int64_t run_begin(Array<const SortedRow> sorted, std::int64_t at) {
  const std::uint32_t id = sorted[at].id;
  if (at == 0 || sorted[at - 1].id != id) return at;
  std::int64_t below = -1, found = at - 1;  // sorted[below] is less, sorted[found] equal
  while (found - below > 1) {
    const std::int64_t middle = below + (found - below) / 2;
    if (sorted[middle].id == id)
      found = middle;
    else
      below = middle;
  }
  return found;
}

/// One past the last of the sorted rows with the id of row `at`.
WEFT_HOST_DEVICE inline std::int64_t run_end(Array<const SortedRow> sorted, std::int64_t at) {
  const std::uint32_t id = sorted[at].id;
  std::int64_t found = at, above = sorted.size;  // sorted[found] is equal, sorted[above] greater
  while (above - found > 1) {
    const std::int64_t middle = found + (above - found) / 2;
    if (sorted[middle].id == id)
      found = middle;
    else
      above = middle;
  }
  return above;
}

/// The first segment that begins at row `at` or later of a run that begins at `begin` <= at.
WEFT_HOST_DEVICE inline std::int64_t next_segment(std::int64_t begin, std::int64_t at) {
  return begin + (at - begin + kRowsPerSum - 1) / kRowsPerSum * kRowsPerSum;
}

/// True if the run of row `at` goes on at row `next`.
WEFT_HOST_DEVICE inline bool same_run(Array<const SortedRow> sorted, std::int64_t at, std::int64_t next) {
  return next < sorted.size && sorted[next].id == sorted[at].id;
}

}  // namespace weft::kernels
