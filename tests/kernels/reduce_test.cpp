// SPDX-License-Identifier: Apache-2.0
#include "kernels/reduce/reduce.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

TEST_CASE("parts are added in their order in fp32 and rounded once, in any type; strided rows keep their neighbours") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : {Scalar::fp32, Scalar::bf16, Scalar::fp16})
      for (const std::int64_t n_parts : {1, 2, 5})
        for (const std::int64_t columns : {1, 33, 256}) {
          const std::int64_t rows = 7, stride = columns + (columns == 256 ? 8 : 3);  // with 8: read in vectors
          const TestMatrix parts(random_floats(n_parts * rows * columns, 1, 10.0f), n_parts * rows, columns, type),
              out(std::vector<float>(static_cast<std::size_t>(rows * stride), 5.0f), rows, stride, type);
          sum_parts(execution, parts.view(), n_parts, out.view().columns_from(0, columns));
          const std::vector<float> values = parts.values(), got = out.values();
          for (std::int64_t i = 0; i < rows * stride; ++i) {
            const std::int64_t n = i / stride, j = i % stride;
            float sum = 0;
            for (std::int64_t p = 0; p < n_parts && j < columns; ++p) sum += values[(p * rows + n) * columns + j];
            REQUIRE(got[i] == (j < columns ? stored_as(type, sum) : 5.0f));
          }
        }
  });
}

TEST_CASE("the largest entries of rows do not depend on the division into calls; ties, signs, NaN, few columns") {
  for_each_backend([&](const Execution& execution) {
    for (const std::int64_t columns : {3, 300, 1500})
      for (const float sign : {1.0f, -1.0f})
        for (const bool skips_self : {false, true}) {
          const std::int64_t rows = 5, k = 4;
          std::vector<float> values = random_floats(rows * columns, 3);
          for (float& value : values) value = std::round(4 * value) / 4;  // ties
          values[1] = std::numeric_limits<float>::quiet_NaN();
          const DeviceArray<float> all(values);
          const DeviceArray<float> best(std::vector<float>(rows * k, 0.0f));
          const DeviceArray<std::int64_t> index(std::vector<std::int64_t>(rows * k, -1));
          for (std::int64_t begin = 0; begin < columns; begin += 700)
            keep_largest(execution, {all.data() + begin, rows, std::min<std::int64_t>(700, columns - begin), columns},
                         sign, begin, skips_self ? 1 : kNoIndex,
                         {{best.data(), rows, k, k}, {index.data(), rows, k, k}});
          const std::vector<float> got = best.values();
          const std::vector<std::int64_t> got_index = index.values();
          for (std::int64_t row = 0; row < rows; ++row) {
            std::vector<std::pair<float, std::int64_t>> expected;
            for (std::int64_t j = 0; j < columns; ++j)
              if (const float value = values[row * columns + j]; !std::isnan(value) && !(skips_self && j == row + 1))
                expected.emplace_back(-sign * value, j);
            std::sort(expected.begin(), expected.end());
            for (std::int64_t i = 0; i < k; ++i) {
              const bool there = i < std::ssize(expected);
              REQUIRE(got_index[row * k + i] == (there ? expected[i].second : -1));
              if (there) REQUIRE(got[row * k + i] == -expected[i].first);
            }
          }
        }
  });
}

}  // namespace weft::testing
