// SPDX-License-Identifier: Apache-2.0
#include "kernels/gradient/gradient.hpp"

#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

/// A sum over n terms in blocks of kRowsPerSum: the roundings of a block, of the sum over the blocks, of a product of
/// three factors with a difference, and of the addition to what was there.
double sum_roundings(std::int64_t n) { return static_cast<double>(kRowsPerSum + row_sums(n)) + 5; }

/// Ids of `rows` rows of a table: one frequent (runs across several blocks), the others rare.
std::vector<std::uint32_t> skewed_ids(std::int64_t n, std::int64_t table, std::uint64_t stream) {
  std::vector<std::uint32_t> ids;
  for (std::int64_t i = 0; i < n; ++i) {
    const Random4 random = philox(stream, Purpose::test, 2, i);
    ids.push_back(random.word[0] % 4 == 0 ? static_cast<std::uint32_t>(table / 2)
                                          : static_cast<std::uint32_t>(random.word[1] % table));
  }
  return ids;
}

std::vector<float> rows_by_id(const Execution& execution, const std::vector<std::uint32_t>& ids, const TestMatrix& g,
                              std::int64_t first_row, std::int64_t rows, std::int64_t columns) {
  const DeviceArray<std::uint32_t> device_ids(ids);
  const DeviceArray<float> out(std::vector<float>(static_cast<std::size_t>(rows * columns), 0.5f));
  const DeviceArray<std::byte> workspace(rows_by_id_workspace(std::ssize(ids), columns));
  add_rows_by_id(execution, device_ids.array(), g.view(), first_row, out.matrix(rows, columns), workspace.array());
  return out.values();
}

}  // namespace

TEST_CASE("column sums and products agree with float64 and add to what is there, or overwrite it") {
  for_each_backend([&](const Execution& execution) {
    for (const std::int64_t rows : {1, 127, 128, 129, 1000})
      for (const std::int64_t columns : {1, 64, 131, 768})
        for (const Scalar type : kRowTypes)
          for (const bool statistics : {false, true}) {
            CAPTURE(rows);
            CAPTURE(columns);
            const TestMatrix x(random_floats(rows * columns, 1), rows, columns, type),
                g(random_floats(rows * columns, 2), rows, columns, type);
            const std::vector<float> shift = random_floats(rows, 3), scale = random_floats(rows, 4);
            const DeviceArray<float> device_shift(shift), device_scale(scale);
            const DeviceArray<float> sums(std::vector<float>(columns, 0.25f)),
                products(std::vector<float>(columns, std::nanf("")));
            const DeviceArray<std::byte> workspace(column_sums_workspace(rows, columns));
            add_column_sums(execution, g.view(), sums.array(), false, workspace.array());
            add_column_products(execution, x.view(), g.view(), statistics ? device_shift.array() : Array<float>{},
                                statistics ? device_scale.array() : Array<float>{}, products.array(), true,
                                workspace.array());
            const std::vector<float> a = x.values(), b = g.values(), got_sums = sums.values(),
                                     got_products = products.values();
            for (std::int64_t j = 0; j < columns; ++j) {
              double sum = 0.25, size = 0.25, product = 0, product_size = 0;
              for (std::int64_t n = 0; n < rows; ++n) {
                const double gradient = b[n * columns + j], value = a[n * columns + j];
                sum += gradient;
                size += std::abs(gradient);
                const double s = statistics ? shift[n] : 0, k = statistics ? scale[n] : 1;
                product += (value - s) * k * gradient;
                product_size += (std::abs(value) + std::abs(s)) * std::abs(k * gradient);
              }
              REQUIRE(std::abs(got_sums[j] - sum) <= sum_roundings(rows) * kRoundoff * size);
              REQUIRE(std::abs(got_products[j] - product) <= sum_roundings(rows) * kRoundoff * product_size);
            }
          }
  });
}

TEST_CASE("rows by id agree with float64: runs within a block, across blocks, ids of other ranks") {
  for_each_backend([&](const Execution& execution) {
    struct Case {
      std::int64_t n, table, columns;
    };
    for (const Case c : {Case{1, 1, 1}, {5, 3, 9}, {300, 1, 31}, {1000, 65, 64}, {3000, 300, 264}, {1500, 70000, 40}})
      for (const Scalar type : kRowTypes) {
        CAPTURE(c.n);
        CAPTURE(c.table);
        const std::vector<std::uint32_t> ids = skewed_ids(c.n, c.table, 7);
        const TestMatrix g(random_floats(c.n * c.columns, 8), c.n, c.columns, type);
        const std::vector<float> gradient = g.values();
        // The whole table, and the part of one rank.
        const std::int64_t part = c.table / 3;
        for (const auto& [first, rows] : {std::pair{std::int64_t{0}, c.table}, {part, c.table - 2 * part}}) {
          const std::vector<float> got = rows_by_id(execution, ids, g, first, rows, c.columns);
          std::vector<double> sum(got.size(), 0.5), size(got.size(), 0.5);
          for (std::int64_t n = 0; n < c.n; ++n) {
            const std::int64_t row = ids[n] - first;
            if (row < 0 || row >= rows) continue;
            for (std::int64_t j = 0; j < c.columns; ++j) {
              sum[row * c.columns + j] += gradient[n * c.columns + j];
              size[row * c.columns + j] += std::abs(gradient[n * c.columns + j]);
            }
          }
          double worst = 0;
          for (std::size_t i = 0; i < got.size(); ++i)
            worst = std::max(worst, std::abs(got[i] - sum[i]) / (sum_roundings(c.n) * kRoundoff * size[i]));
          CHECK(worst <= 1);
        }
      }
  });
}

TEST_CASE("rows by id are added in ascending order: the same bits every time, and those of a loop in a block") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t n = 100, columns = 33;  // fewer rows than a block
    const std::vector<std::uint32_t> ids = skewed_ids(n, 7, 9);
    const TestMatrix g(random_floats(n * columns, 10), n, columns, Scalar::fp32);
    const std::vector<float> got = rows_by_id(execution, ids, g, 0, 7, columns), gradient = g.values();
    std::vector<float> want(7 * columns);
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t j = 0; j < columns; ++j) want[ids[i] * columns + j] += gradient[i * columns + j];
    std::vector<bool> present(7);
    for (const std::uint32_t id : ids) present[id] = true;
    for (std::int64_t i = 0; i < std::ssize(want); ++i)
      REQUIRE(got[i] == (present[i / columns] ? 0.5f + want[i] : 0.5f));
    CHECK(got == rows_by_id(execution, ids, g, 0, 7, columns));
  });
}

}  // namespace weft::testing
