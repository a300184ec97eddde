// SPDX-License-Identifier: Apache-2.0
//
// Kernels of dead features, rankings and tied decoders against plain float64 loops.
#include <limits>

#include "kernels/transcoder/decode/tied.hpp"
#include "kernels/transcoder/loss/auxiliary.hpp"
#include "kernels/transcoder/select/ranking.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

TEST_CASE("mask_alive keeps the biases of features that have been silent for the window") {
  for_each_backend([&](const Execution& execution) {
    constexpr std::int64_t kLayers = 3, kFeatures = 37;
    const std::vector<float> bias = random_floats(kLayers * kFeatures, 1);
    std::vector<std::int64_t> clocks;
    for (std::int64_t i = 0; i < kLayers * kFeatures; ++i) clocks.push_back(90 + i % 21);
    const DeviceArray<float> b(bias), masked(kLayers * kFeatures);
    mask_alive(execution, b.matrix(kLayers, kFeatures), DeviceArray<std::int64_t>(clocks).array(), 100,
               masked.matrix(kLayers, kFeatures));
    const std::vector<float> found = masked.values();
    for (std::size_t i = 0; i < bias.size(); ++i)
      CHECK(found[i] == (clocks[i] >= 100 ? bias[i] : -std::numeric_limits<float>::infinity()));
  });
}

TEST_CASE("auxiliary_rows agrees with float64, and adds its squares") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : {Scalar::fp32, Scalar::bf16})
      for (const std::int64_t columns : {1, 300, 770})
        for (const std::int64_t parts : {1, 3}) {
          constexpr std::int64_t kRows = 7;
          const TestMatrix partial(random_floats(parts * kRows * columns, 1), parts * kRows, columns, type),
              gradient(random_floats(kRows * columns, 2), kRows, columns, type),
              rows(std::vector<float>(kRows * columns, 9.0f), kRows, columns, type);
          const DeviceArray<double> squares(std::vector<double>(kRows, 2.0));
          constexpr float kFactor = 0.3f, kCoefficient = 0.7f;
          auxiliary_rows(execution, partial.view(), parts, gradient.view(), kFactor, kCoefficient, rows.view(),
                         squares.array());
          const std::vector<float> p = partial.values(), g = gradient.values(), found = rows.values();
          const std::vector<double> sums = squares.values();
          // At most parts + 3 roundings of terms below 0.3 parts + 1, and one of the stored type.
          const double tolerance = static_cast<double>(parts + 3) * kRoundoff * (0.3 * static_cast<double>(parts) + 1) +
                                   (type == Scalar::bf16 ? kRoundoffBf16 * (0.3 * static_cast<double>(parts) + 1) : 0);
          for (std::int64_t n = 0; n < kRows; ++n) {
            double sum = 2;
            for (std::int64_t j = 0; j < columns; ++j) {
              double u = 0;
              for (std::int64_t part = 0; part < parts; ++part) u += p[(part * kRows + n) * columns + j];
              u = static_cast<double>(kCoefficient) *
                  (static_cast<double>(kFactor) * u + static_cast<double>(g[n * columns + j]));
              sum += u * u;
              CHECK(std::abs(found[n * columns + j] - u) <= tolerance);
            }
            // Before rounding to the stored type.
            CHECK(sums[n] == doctest::Approx(sum).epsilon(1e-5));
          }
        }
  });
}

TEST_CASE("rank_tile gives relu(z) times the norm, and unrank the activations back") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
      constexpr std::int64_t kRows = 5, kFeatures = 300;
      std::vector<float> norm = random_floats(kFeatures, 3);
      for (float& value : norm) value = std::abs(value) + 0.1f;
      norm[7] = 0;
      const TestMatrix product(random_floats(kRows * kFeatures, 1), kRows, kFeatures, type);
      const std::vector<float> before = product.values(), bias = random_floats(kFeatures, 2);
      rank_tile(execution, product.view(), DeviceArray<float>(bias).array(), DeviceArray<float>(norm).array());
      const std::vector<float> found = product.values();
      // Two roundings of fp32, one of the stored type.
      const double relative = 2 * kRoundoff + (type == Scalar::bf16 ? kRoundoffBf16 : kRoundoff);
      for (std::size_t i = 0; i < found.size(); ++i) {
        const float z = before[i] + bias[i % kFeatures];
        const double expected = z > 0 ? static_cast<double>(z) * norm[i % kFeatures] : 0;
        CHECK(std::abs(found[i] - expected) <= relative * expected);
      }
    }
    // Two tokens of two layers; the last place of the list is not in use.
    const std::vector<float> norm{0.5f, 2, 4, 8};
    const DeviceArray<std::int64_t> offsets(std::vector<std::int64_t>{0, 2, 3});
    const DeviceArray<std::uint32_t> key(std::vector<std::uint32_t>{0, 3, 2, 1});
    const DeviceArray<float> value(std::vector<float>{1, 16, 2, 7});
    unrank(execution, {2, 2, 2, offsets.array(), key.array(), value.array()}, DeviceArray<float>(norm).array());
    CHECK(value.values() == std::vector<float>{2, 2, 0.5f, 7});
  });
}

TEST_CASE("sums over layers in both directions agree with float64") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : {Scalar::fp32, Scalar::bf16})
      for (const std::int64_t d : {1, 20, 770})
        for (const bool later : {true, false}) {
          constexpr std::int64_t kRows = 5, kLayers = 4;
          const TestMatrix rows(random_floats(kRows * kLayers * d, 4), kRows, kLayers * d, type);
          const std::vector<float> before = rows.values();
          if (later)
            sum_to_later_layers(execution, rows.view(), d);
          else
            sum_from_later_layers(execution, rows.view(), d);
          const std::vector<float> after = rows.values();
          for (std::int64_t n = 0; n < kRows; ++n)
            for (std::int64_t c = 0; c < d; ++c) {
              double sum = 0;
              for (std::int64_t i = 0; i < kLayers; ++i) {
                const auto at = static_cast<std::size_t>((n * kLayers + (later ? i : kLayers - 1 - i)) * d + c);
                sum += before[at];
                // Sums of at most four values below 1: three roundings of fp32, and one of the stored type.
                CHECK(std::abs(after[at] - sum) <= 4 * (3 * kRoundoff + (type == Scalar::bf16 ? kRoundoffBf16 : 0)));
              }
            }
        }
  });
}

}  // namespace weft::testing
