// SPDX-License-Identifier: Apache-2.0
#include "kernels/reduce/reduce.hpp"

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

}  // namespace weft::testing
