// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/residual/residual.hpp"

#include "tests/kernels/support.hpp"

using namespace weft;
using namespace weft::testing;
using kernels::Scalar;

TEST_CASE("add_bias, add_rows and scale_rows compute in fp32 and round once") {
  for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {7, 64}, {5, 777}})
    for (const Scalar type : kRowTypes)
      for_each_backend([&](const kernels::Execution& execution) {
        const TestMatrix a(random_floats(rows * columns, 1), rows, columns, type),
            b(random_floats(rows * columns, 2), rows, columns, Scalar::fp32),
            sum(std::vector<float>(static_cast<std::size_t>(rows * columns)), rows, columns, type);
        const std::vector<float> bias = random_floats(columns, 3);
        const DeviceArray<float> device_bias(bias);
        const std::vector<float> x = a.values(), y = b.values();
        kernels::add_rows(execution, a.view(), b.view(), sum.view());
        kernels::add_bias(execution, a.view(), device_bias.array());
        kernels::fence(execution);
        const std::vector<float> sums = sum.values(), biased = a.values();
        kernels::scale_rows(execution, sum.view(), 1.7f);
        kernels::fence(execution);
        const std::vector<float> scaled = sum.values();
        for (std::int64_t i = 0; i < rows * columns; ++i) {
          const auto at = static_cast<std::size_t>(i);
          CHECK(sums[at] == stored_as(type, x[at] + y[at]));
          CHECK(scaled[at] == stored_as(type, sums[at] * 1.7f));
          CHECK(biased[at] == stored_as(type, x[at] + bias[static_cast<std::size_t>(i % columns)]));
        }
      });
}
