// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/order.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/contract.hpp"
#include "base/error.hpp"

namespace weft::dataset {

std::int64_t BlockTable::n_windows() const {
  return (static_cast<std::int64_t>(blocks.size()) + blocks_per_window - 1) / blocks_per_window;
}

BlockTable block_table(std::span<const std::int64_t> rows_per_file, std::int64_t block_rows, std::int64_t window_rows) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  if (block_rows < 1 || window_rows < 1 || block_rows > kMost || window_rows > kMost)
    throw collective_error(ExitCode::usage, "data.block_rows = {}, data.window_rows = {}: out of range (1 to {})",
                           block_rows, window_rows, kMost);
  BlockTable table;
  table.block_rows = block_rows;
  table.blocks_per_window = std::max<std::int64_t>(1, window_rows / block_rows);
  for (std::size_t file = 0; file < rows_per_file.size(); ++file)
    for (std::int64_t begin = 0; begin < rows_per_file[file]; begin += block_rows)
      table.blocks.push_back(
          {static_cast<std::int64_t>(file), begin, std::min(block_rows, rows_per_file[file] - begin)});
  for (const Block& block : table.blocks) table.n_rows += block.rows;
  if (table.blocks.size() >> 32 != 0)
    throw collective_error(
        ExitCode::usage,
        "data.block_rows = {} divides the dataset into {} blocks (at most 2^32 - 1 are supported); use larger blocks",
        block_rows, table.blocks.size());
  return table;
}

BlockTable block_table(const Description& description, const Settings& settings) {
  std::vector<std::int64_t> rows;
  for (const FileDescription& file : description.files) rows.push_back(file.rows);
  return block_table(rows, settings.block_rows, settings.window_rows);
}

std::vector<std::uint32_t> permutation(std::int64_t n, std::uint64_t seed, kernels::Purpose purpose, std::uint64_t step,
                                       std::uint64_t first_index) {
  std::vector<std::uint32_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0u);
  for (std::int64_t i = n - 1; i > 0; --i) {
    const kernels::Random4 random = kernels::philox(seed, purpose, step, first_index + static_cast<std::uint64_t>(i));
    std::swap(order[static_cast<std::size_t>(i)],
              order[kernels::uniform_below(random, static_cast<std::uint64_t>(i) + 1)]);
  }
  return order;
}

std::int64_t EpochOrder::window_of(std::int64_t position) const {
  return std::upper_bound(window_begin.begin(), window_begin.end(), position) - window_begin.begin() - 1;
}

EpochOrder epoch_order(const BlockTable& table, std::uint64_t seed, std::int64_t epoch) {
  EpochOrder order;
  order.epoch = epoch;
  order.blocks = permutation(static_cast<std::int64_t>(table.blocks.size()), seed, kernels::Purpose::block_order,
                             static_cast<std::uint64_t>(epoch), 0);
  std::int64_t position = 0;
  for (std::size_t i = 0; i < order.blocks.size(); ++i) {
    if (static_cast<std::int64_t>(i) % table.blocks_per_window == 0) order.window_begin.push_back(position);
    position += table.blocks[order.blocks[i]].rows;
  }
  order.window_begin.push_back(position);
  return order;
}

WindowOrder window_order(const BlockTable& table, const EpochOrder& epoch, std::uint64_t seed, std::int64_t window) {
  const std::size_t first = static_cast<std::size_t>(window * table.blocks_per_window);
  const std::size_t last = std::min(first + static_cast<std::size_t>(table.blocks_per_window), epoch.blocks.size());
  WindowOrder order;
  order.begin = epoch.window_begin[static_cast<std::size_t>(window)];
  order.blocks.assign(epoch.blocks.begin() + static_cast<std::ptrdiff_t>(first),
                      epoch.blocks.begin() + static_cast<std::ptrdiff_t>(last));
  std::vector<WindowOrder::Row> stored;
  for (std::uint32_t b = 0; b < order.blocks.size(); ++b)
    for (std::uint32_t row = 0; row < table.blocks[order.blocks[b]].rows; ++row) stored.push_back({b, row});
  WEFT_ASSERT(static_cast<std::int64_t>(stored.size()) ==
              epoch.window_begin[static_cast<std::size_t>(window) + 1] - order.begin);
  const std::vector<std::uint32_t> mixed =
      permutation(static_cast<std::int64_t>(stored.size()), seed, kernels::Purpose::row_order,
                  static_cast<std::uint64_t>(epoch.epoch), static_cast<std::uint64_t>(window) << 32);
  order.rows.resize(stored.size());
  for (std::size_t i = 0; i < stored.size(); ++i) order.rows[i] = stored[mixed[i]];
  return order;
}

Cursor advance(const BlockTable& table, Cursor cursor, std::int64_t n) {
  cursor.position += n;
  cursor.epoch += cursor.position / table.n_rows;
  cursor.position %= table.n_rows;
  return cursor;
}

std::vector<RowRange> locate(const BlockTable& table, std::uint64_t seed, Cursor cursor, std::int64_t n) {
  std::vector<std::pair<std::int64_t, std::int64_t>> rows;  // (file, row)
  while (n > 0) {
    const EpochOrder epoch = epoch_order(table, seed, cursor.epoch);
    const WindowOrder window = window_order(table, epoch, seed, epoch.window_of(cursor.position));
    const std::int64_t first = cursor.position - window.begin;
    const std::int64_t count = std::min(n, static_cast<std::int64_t>(window.rows.size()) - first);
    for (std::int64_t i = first; i < first + count; ++i) {
      const WindowOrder::Row row = window.rows[static_cast<std::size_t>(i)];
      const Block& block = table.blocks[window.blocks[row.block]];
      rows.emplace_back(block.file, block.row_begin + row.row);
    }
    cursor = advance(table, cursor, count);
    n -= count;
  }
  std::sort(rows.begin(), rows.end());
  std::vector<RowRange> ranges;
  for (const auto& [file, row] : rows) {
    if (!ranges.empty() && ranges.back().file == file && row <= ranges.back().end)
      ranges.back().end = std::max(ranges.back().end, row + 1);
    else
      ranges.push_back({file, row, row + 1});
  }
  return ranges;
}

std::string to_text(const Description& description, std::span<const RowRange> ranges) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, ranges.size()); ++i) {
    const RowRange& range = ranges[i];
    if (i == 0 || ranges[i - 1].file != range.file)
      text +=
          fmt::format("{}{} rows ", i == 0 ? "" : "; ", description.files[static_cast<std::size_t>(range.file)].name);
    else
      text += ", ";
    text += range.end == range.begin + 1 ? fmt::format("{}", range.begin)
                                         : fmt::format("{}-{}", range.begin, range.end - 1);
  }
  if (ranges.size() > kShown) text += fmt::format("; and {} more ranges", ranges.size() - kShown);
  return text;
}

}  // namespace weft::dataset
