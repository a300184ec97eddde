// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/order.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "tests/test.hpp"

namespace weft::dataset {
namespace {

using FileRow = std::pair<std::int64_t, std::int64_t>;

/// All rows of an epoch in their order.
std::vector<FileRow> rows_of(const BlockTable& table, std::uint64_t seed, std::int64_t epoch) {
  const EpochOrder order = epoch_order(table, seed, epoch);
  std::vector<FileRow> rows;
  for (std::int64_t w = 0; w < table.n_windows(); ++w) {
    const WindowOrder window = window_order(table, order, seed, w);
    REQUIRE(window.begin == static_cast<std::int64_t>(rows.size()));
    for (const WindowOrder::Row row : window.rows) {
      const Block& block = table.blocks[window.blocks[row.block]];
      rows.emplace_back(block.file, block.row_begin + row.row);
    }
  }
  return rows;
}

struct Case {
  std::vector<std::int64_t> files;
  std::int64_t block_rows, window_rows;
};
const Case kCases[] = {{{1}, 256, 65536},
                       {{5, 3}, 2, 4},
                       {{100, 37, 1, 64}, 16, 48},
                       {{1000, 777}, 7, 1},
                       {{2048, 2048, 2048}, 256, 1024}};

}  // namespace

TEST_CASE("every row occurs exactly once per epoch, for all sizes") {
  for (const Case& c : kCases) {
    const BlockTable table = block_table(c.files, c.block_rows, c.window_rows);
    for (const std::int64_t epoch : {0, 1, 5}) {
      std::vector<FileRow> rows = rows_of(table, 3, epoch);
      std::sort(rows.begin(), rows.end());
      std::vector<FileRow> expected;
      for (std::size_t f = 0; f < c.files.size(); ++f)
        for (std::int64_t r = 0; r < c.files[f]; ++r) expected.emplace_back(f, r);
      CHECK(rows == expected);
    }
  }
}

TEST_CASE("the last block of a file may be short and is not merged with the next file") {
  const BlockTable table = block_table(std::vector<std::int64_t>{100, 37, 1, 64}, 16, 48);
  CHECK(table.blocks.size() == 7 + 3 + 1 + 4);
  CHECK(table.n_rows == 202);
  CHECK(table.blocks_per_window == 3);
  for (const Block& block : table.blocks) {
    CHECK(block.rows >= 1);
    CHECK(block.row_begin % 16 == 0);
  }
}

TEST_CASE("the order depends on seed and epoch") {
  const BlockTable table = block_table(std::vector<std::int64_t>{2048, 2048, 2048}, 256, 1024);
  CHECK(rows_of(table, 1, 0) == rows_of(table, 1, 0));
  CHECK(rows_of(table, 1, 0) != rows_of(table, 1, 1));
  CHECK(rows_of(table, 1, 0) != rows_of(table, 2, 0));
}

TEST_CASE("the order equals a reference value") {
  // With a different order, old checkpoints would resume on other rows. Reference computed with this code.
  const BlockTable table = block_table(std::vector<std::int64_t>{10, 6}, 4, 8);
  const std::vector<FileRow> rows = rows_of(table, 42, 0);
  std::string text;
  for (const auto& [file, row] : rows) text += fmt::format("{}:{} ", file, row);
  CHECK(text == "1:4 1:5 0:7 0:5 0:4 0:6 0:2 0:1 0:3 0:8 0:0 0:9 1:0 1:2 1:3 1:1 ");
}

TEST_CASE("permutations of three elements are equally frequent") {
  std::map<std::vector<std::uint32_t>, int> count;
  constexpr int kTrials = 60000;
  for (int i = 0; i < kTrials; ++i)
    ++count[permutation(3, 9, kernels::Purpose::test, static_cast<std::uint64_t>(i), 0)];
  CHECK(count.size() == 6);
  // 10,000 expected, standard deviation 91: 5 of them.
  for (const auto& [order, n] : count) CHECK(std::abs(n - kTrials / 6) < 460);
}

TEST_CASE("a window shuffles all of its rows") {
  const BlockTable table = block_table(std::vector<std::int64_t>{4096}, 256, 2048);
  const WindowOrder window = window_order(table, epoch_order(table, 1, 0), 1, 0);
  std::set<std::uint32_t> blocks;
  for (int i = 0; i < 64; ++i) blocks.insert(window.rows[static_cast<std::size_t>(i)].block);
  // 64 draws from 8 blocks miss one with a probability of 8 * (7/8)^64 = 0.0016. The seed is fixed.
  CHECK(blocks.size() == 8);
}

TEST_CASE("advance crosses the ends of epochs") {
  const BlockTable table = block_table(std::vector<std::int64_t>{10, 6}, 4, 8);
  CHECK(advance(table, {0, 0}, 15) == Cursor{0, 15});
  CHECK(advance(table, {0, 15}, 1) == Cursor{1, 0});
  CHECK(advance(table, {2, 3}, 100) == Cursor{8, 7});
}

TEST_CASE("locate gives exactly the rows of a batch, also across the end of an epoch") {
  const BlockTable table = block_table(std::vector<std::int64_t>{100, 37, 1, 64}, 16, 48);
  std::vector<FileRow> expected;
  for (const std::int64_t epoch : {0, 1}) {
    const std::vector<FileRow> rows = rows_of(table, 7, epoch);
    if (epoch == 0)
      expected.insert(expected.end(), rows.begin() + 190, rows.end());
    else
      expected.insert(expected.end(), rows.begin(), rows.begin() + 20);
  }
  std::set<FileRow> wanted(expected.begin(), expected.end()), found;
  for (const RowRange& range : locate(table, 7, {0, 190}, 32))
    for (std::int64_t r = range.begin; r < range.end; ++r) found.emplace(range.file, r);
  CHECK(found == wanted);
  Description description;
  description.files = {{"chunk_0.hdf5"}, {"chunk_1.h5"}};
  CHECK(to_text(description, std::vector<RowRange>{{0, 3, 4}, {0, 8, 16}, {1, 0, 2}}) ==
        "chunk_0.hdf5 rows 3, 8-15; chunk_1.h5 rows 0-1");
}

TEST_CASE("sizes below 1 are usage errors") {
  CHECK_THROWS_AS(block_table(std::vector<std::int64_t>{4}, 0, 8), Error);
  CHECK_THROWS_AS(block_table(std::vector<std::int64_t>{4}, 8, 0), Error);
}

}  // namespace weft::dataset
