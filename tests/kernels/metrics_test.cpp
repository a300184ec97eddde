// SPDX-License-Identifier: Apache-2.0
#include "kernels/metrics/metric_sums.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

TEST_CASE("accumulate_dimensions adds the sums of each batch, to fp64 accuracy") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const std::int64_t columns : {1, 64, 195, 1536})
      for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
        const std::vector<float> mean = random_floats(columns, 1), spread = random_floats(columns, 2),
                                 pivot = random_floats(columns, 3);
        const DeviceArray<float> device_mean(mean), device_spread(spread), device_pivot(pivot);
        const DeviceArray<double> error(columns), squared_error(columns), target(columns), squared_target(columns);
        const DimensionSums sums{error.array(), squared_error.array(), target.array(), squared_target.array()};
        std::vector<double> expected[4];
        for (auto& e : expected) e.assign(columns, 0.0);
        std::int64_t terms = 0;
        for (const std::int64_t rows : {1, 300}) {  // two batches
          const TestMatrix y(random_floats(rows * columns, 4), rows, columns, type),
              estimate(random_floats(rows * columns, 5), rows, columns, Scalar::fp32);
          accumulate_dimensions(execution, y.view(), estimate.view(), device_mean.array(), device_spread.array(),
                                device_pivot.array(), sums);
          const std::vector<float> a = y.values(), b = estimate.values();
          for (std::int64_t i = 0; i < rows * columns; ++i) {
            const std::int64_t j = i % columns;
            const double e = a[i] - (static_cast<double>(b[i]) * spread[j] + mean[j]),
                         t = static_cast<double>(a[i]) - pivot[j];
            expected[0][j] += e;
            expected[1][j] += e * e;
            expected[2][j] += t;
            expected[3][j] += t * t;
          }
          terms += rows;
        }
        const std::vector<double> result[4] = {error.values(), squared_error.values(), target.values(),
                                               squared_target.values()};
        // All in fp64; terms are below 9 in magnitude, and a fused multiply-add may round differently.
        for (int which = 0; which < 4; ++which)
          for (std::int64_t j = 0; j < columns; ++j)
            REQUIRE(std::abs(result[which][j] - expected[which][j]) <= 9 * terms * 4 * 0x1p-53 * terms);
      }
  });
}

TEST_CASE("firing counts and clocks follow the hits of each batch") {
  for_each_backend([&](const kernels::Execution& execution) {
    const Sparse first = random_sparse(20, 2, 30, 0.05, 1), second = random_sparse(20, 2, 30, 0.05, 2);
    const DeviceArray<std::int64_t> fired(first.n_keys()), since(std::vector<std::int64_t>(first.n_keys(), 100));
    std::vector<std::int64_t> expected_fired(first.n_keys()), expected_since(first.n_keys(), 100);
    const DeviceArray<AdamStep> step(std::vector<AdamStep>{AdamStep{}});
    for (const Sparse* batch : {&first, &second}) {
      accumulate_firing(execution, batch->csc(), fired.array());
      advance_clocks(execution, batch->csc(), 4096, step.data(), since.array());
      for (std::int64_t key = 0; key < first.n_keys(); ++key) {
        const std::int64_t hits = std::count(batch->key.begin(), batch->key.end(), static_cast<std::uint32_t>(key));
        expected_fired[key] += hits;
        expected_since[key] = hits > 0 ? 0 : expected_since[key] + 4096;
      }
    }
    CHECK(fired.values() == expected_fired);
    AdamStep withheld{};
    withheld.withheld = 1;
    const DeviceArray<AdamStep> no_step(std::vector<AdamStep>{withheld});
    advance_clocks(execution, first.csc(), 4096, no_step.data(), since.array());
    CHECK(since.values() == expected_since);
  });
}

}  // namespace weft::testing
