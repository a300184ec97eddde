// SPDX-License-Identifier: Apache-2.0
//
// Dense rows of activations against plain loops. Values are compared, selected or multiplied once: equal, but for
// one or two roundings of a product.
#include <numeric>

#include "kernels/transcoder/rows/dense_rows.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr std::int64_t kRows = 7, kColumns = 301, kStride = 400;

/// Random values with ties, zeros and a NaN; row 3 has two positive values only.
std::vector<float> rows_with_ties() {
  std::vector<float> values = random_floats(kRows * kStride, 5);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::round(values[i] * 4) / 4;
  for (std::int64_t f = 0; f < kColumns; ++f) values[static_cast<std::size_t>(3 * kStride + f)] = f % 200 == 7 ? 1 : -2;
  values[5 * kStride + 11] = std::numeric_limits<float>::quiet_NaN();
  values[6 * kStride + 12] = std::numeric_limits<float>::infinity();
  return values;
}

Matrix<float> view(const DeviceArray<float>& values) { return {values.data(), kRows, kColumns, kStride}; }

}  // namespace

TEST_CASE("keep_largest keeps the k largest positive values of a row, of equal ones the first") {
  const std::vector<float> values = rows_with_ties();
  for_each_backend([&](const Execution& execution) {
    for (const std::int64_t k : {1, 2, 16, 300, 1000}) {
      CAPTURE(k);
      const DeviceArray<float> z(values);
      keep_largest(execution, k, view(z));
      const std::vector<float> result = z.values();
      for (std::int64_t n = 0; n < kRows; ++n) {
        const float* row = values.data() + n * kStride;
        std::vector<std::int64_t> order;
        for (std::int64_t f = 0; f < kColumns; ++f)
          if (row[f] > 0) order.push_back(f);
        std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return row[a] > row[b]; });
        std::vector<float> expected(row, row + kStride);
        std::fill_n(expected.begin(), kColumns, 0.0f);
        for (std::int64_t i = 0; i < std::min<std::int64_t>(k, std::ssize(order)); ++i)
          expected[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] =
              row[order[static_cast<std::size_t>(i)]];
        // What lies between the rows is not touched.
        REQUIRE(std::equal(expected.begin(), expected.end(), result.begin() + n * kStride,
                           [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }));
      }
    }
  });
}

TEST_CASE("add_to_rows, keep_above, mask_inactive and jump_rows are what the formulas say") {
  const std::vector<float> start = random_floats(kRows * kStride, 6), alpha = random_floats(kRows * kStride, 7),
                           bias = random_floats(kColumns, 8);
  std::vector<float> cut(kColumns), theta(kColumns);
  for (std::size_t f = 0; f < cut.size(); ++f) theta[f] = cut[f] = 0.1f + 0.001f * static_cast<float>(f);
  const JumpRule rule = jump_rule(JumpForm::anthropic, 0.8f);
  for_each_backend([&](const Execution& execution) {
    const DeviceArray<float> z(start), a(start), of_bias(bias), cuts(cut), gradient(alpha), masked(alpha),
        of_theta(kRows * kColumns);
    add_to_rows(execution, of_bias.array(), view(z));
    keep_above(execution, view(z), cuts.array(), view(a));
    mask_inactive(execution, view(a), view(masked));
    jump_rows(execution, rule, view(z), cuts.array(), view(gradient), {of_theta.data(), kRows, kColumns, kColumns});
    const std::vector<float> zs = z.values(), as = a.values(), dz = gradient.values(), masks = masked.values(),
                             ts = of_theta.values();
    for (std::int64_t n = 0; n < kRows; ++n)
      for (std::int64_t f = 0; f < kColumns; ++f) {
        const auto i = static_cast<std::size_t>(n * kStride + f);
        const float value = start[i] + bias[static_cast<std::size_t>(f)], least = cut[static_cast<std::size_t>(f)];
        REQUIRE(zs[i] == value);
        REQUIRE(as[i] == (value > least ? value : 0));
        REQUIRE(masks[i] == (value > least ? alpha[i] : 0));
        REQUIRE(dz[i] == (value > least ? alpha[i] : 0));
        const float slope = std::abs(value - least) < 0.4f ? -least / 0.8f : 0;
        REQUIRE(ts[static_cast<std::size_t>(n * kColumns + f)] == doctest::Approx(slope * alpha[i]).epsilon(1e-6));
      }
    keep_above(execution, view(z), {}, view(z));  // in place, without cuts
    const std::vector<float> positive = z.values();
    for (std::int64_t f = 0; f < kColumns; ++f)
      REQUIRE(positive[static_cast<std::size_t>(f)] == std::max(0.0f, zs[static_cast<std::size_t>(f)]));
  });
}

}  // namespace weft::testing
