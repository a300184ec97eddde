// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/embedding/embedding.hpp"

#include <numeric>

#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {

using namespace weft::kernels;

TEST_CASE("embed takes rows of the tables and adds them") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t rows = 23, vocabulary = 11, longest = 6;
    int margins = 0;
    for (const std::int64_t columns : {1, 31, 64, 768})
      for (const Scalar type : kRowTypes)
        for (const Scalar out_type : kRowTypes)
          for (const bool learned : {false, true}) {
            CAPTURE(columns);
            const Margins margin = kMargins[margins++ % 3];
            const Rows tokens(random_floats(vocabulary * columns, 1), vocabulary, columns, type, margin),
                positions(random_floats(longest * columns, 2), longest, columns, type, margin);
            const Rows out(rows, columns, out_type, margin);
            std::vector<std::uint32_t> ids;
            std::vector<std::int32_t> position;
            for (std::int64_t n = 0; n < rows; ++n) {
              ids.push_back(static_cast<std::uint32_t>(n * n % vocabulary));
              position.push_back(static_cast<std::int32_t>(n % longest));
            }
            const DeviceArray<std::uint32_t> device_ids(ids);
            const DeviceArray<std::int32_t> device_position(position);
            embed(execution, tokens.view(), 0, device_ids.array(), learned ? positions.view() : AnyMatrix{},
                  device_position.array(), out.view());
            const std::vector<float> e = tokens.values(), p = positions.values(), got = out.values();
            for (std::int64_t i = 0; i < rows * columns; ++i) {
              const std::int64_t n = i / columns, j = i % columns;
              const float sum = e[ids[n] * columns + j] + (learned ? p[position[n] * columns + j] : 0.0f);
              REQUIRE(got[i] == stored_as(out_type, sum));
            }
          }
  });
}

TEST_CASE("parts of a table add up to the whole: ids of other parts add nothing") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t rows = 23, vocabulary = 11;
    for (const std::int64_t columns : {31, 64})
      for (const Scalar type : kRowTypes) {
        const Rows tokens(random_floats(vocabulary * columns, 1), vocabulary, columns, type, kMargins[0]);
        std::vector<std::uint32_t> ids;
        for (std::int64_t n = 0; n < rows; ++n) ids.push_back(static_cast<std::uint32_t>(n * n % vocabulary));
        const DeviceArray<std::uint32_t> device_ids(ids);
        const std::vector<float> e = tokens.values();
        for (const std::int64_t begin : {0, 4, 10}) {
          const std::int64_t end = begin == 0 ? 4 : begin == 4 ? 10 : vocabulary;
          const Rows out(rows, columns, type, kMargins[0]);
          embed(execution, tokens.view().rows_from(begin, end - begin), begin, device_ids.array(), {}, {}, out.view());
          const std::vector<float> got = out.values();
          for (std::int64_t i = 0; i < rows * columns; ++i) {
            const std::int64_t id = ids[i / columns];
            REQUIRE(got[i] == (id >= begin && id < end ? e[id * columns + i % columns] : 0.0f));
          }
        }
      }
  });
}

namespace {

std::vector<float> dropped(const Execution& execution, const Rows& x, DropoutSite site, std::uint64_t step = 3) {
  AdamStep constants{};
  constants.seed = 5;
  constants.step = step;
  const DeviceArray<AdamStep> device(std::vector<AdamStep>{constants});
  dropout(execution, site, device.data(), x.view());
  return x.values();
}

std::vector<float> ones(std::int64_t size) { return std::vector<float>(static_cast<std::size_t>(size), 1.0f); }

}  // namespace

TEST_CASE("dropout keeps the mean: each element is 0 or 1 / (1 - p), with the right frequency") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t rows = 400, columns = 250;
    for (const float p : {0.1f, 0.5f, 0.9f}) {
      const std::vector<float> got =
          dropped(execution, Rows(ones(rows * columns), rows, columns, Scalar::fp32), {1, p});
      std::int64_t kept = 0;
      std::vector<std::int64_t> by_column(columns);
      for (std::int64_t i = 0; i < std::ssize(got); ++i) {
        if (got[i] == 0.0f) continue;
        REQUIRE(got[i] == doctest::Approx(1 / (1 - p)).epsilon(2e-4));  // p is rounded to a multiple of 2^-16
        ++kept;
        ++by_column[i % columns];
      }
      // Fixed seed: five standard deviations of the binomial, and of every column.
      const auto within = [&](std::int64_t count, std::int64_t n) {
        return std::abs(static_cast<double>(count) - n * (1.0 - p)) <= 5 * std::sqrt(n * p * (1.0 - p));
      };
      CHECK(within(kept, rows * columns));
      for (const std::int64_t count : by_column) REQUIRE(within(count, rows));
    }
  });
}

TEST_CASE("the mask of dropout depends on seed, step, site, global row and column alone") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t rows = 37, columns = 264;
    for (const Scalar type : kRowTypes)
      for (const Margins margin : kMargins) {
        const DropoutSite site{2, 0.25f, 100};
        const std::vector<float> whole =
            dropped(execution, Rows(ones(rows * columns), rows, columns, type, margin), site);
        // Split into micro-batches.
        std::vector<float> parts;
        for (std::int64_t begin = 0; begin < rows; begin += 10) {
          const std::int64_t count = std::min<std::int64_t>(10, rows - begin);
          const std::vector<float> part = dropped(execution, Rows(ones(count * columns), count, columns, type, margin),
                                                  {site.site, site.probability, site.first_row + begin});
          parts.insert(parts.end(), part.begin(), part.end());
        }
        CHECK(parts == whole);
        const auto other = [&](DropoutSite at, std::uint64_t step) {
          return dropped(execution, Rows(ones(rows * columns), rows, columns, type, margin), at, step);
        };
        CHECK(other(site, 3) == whole);
        CHECK(other(site, 4) != whole);
        CHECK(other({3, 0.25f, 100}, 3) != whole);
        CHECK(other({2, 0.25f, 101}, 3) != whole);
      }
  });
}

TEST_CASE("both backends draw the same mask, and a gradient is dropped like its values") {
  std::vector<std::vector<float>> masks;
  for_each_backend([&](const Execution& execution) {
    masks.push_back(dropped(execution, Rows(ones(33 * 100), 33, 100, Scalar::fp32), {7, 0.1f, 1 << 20}));
    const std::vector<float> x = random_floats(33 * 100, 4);
    const std::vector<float> got = dropped(execution, Rows(x, 33, 100, Scalar::fp32), {7, 0.1f, 1 << 20});
    for (std::size_t i = 0; i < got.size(); ++i) REQUIRE(got[i] == masks.back()[i] * x[i]);
  });
  for (const auto& mask : masks) CHECK(mask == masks.front());
}

TEST_CASE("dropout with probability 0 changes nothing, with probability 1 everything") {
  for_each_backend([&](const Execution& execution) {
    const std::vector<float> x = random_floats(300, 4);
    CHECK(dropped(execution, Rows(x, 3, 100, Scalar::fp32), {1, 0.0f}) == x);
    CHECK(dropped(execution, Rows(x, 3, 100, Scalar::fp32), {1, 1.0f}) == std::vector<float>(300, 0.0f));
  });
}

}  // namespace weft::testing
