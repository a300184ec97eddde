// SPDX-License-Identifier: Apache-2.0
#include "kernels/transcoder/loss/loss.hpp"

#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

struct Shape {
  std::int64_t n_tokens, n_layers, d_model, n_parts;
};
constexpr Shape kShapes[] = {{1, 1, 1, 1},     {7, 3, 770, 2},   {33, 5, 31, 4},  {1, 2, 257, 3},
                             {300, 4, 768, 3}, {129, 3, 384, 1}, {64, 2, 2048, 2}};

struct Result {
  std::vector<float> gradient;
  std::vector<double> squared_error, standardised_error, standardised_target;
};

struct Inputs {
  Shape shape;
  TestMatrix partial, target;
  std::vector<float> bias, centre, standardise;

  Inputs(const Shape& s, Scalar type, Scalar target_type)
      : shape(s),
        partial(random_floats(s.n_parts * s.n_tokens * s.n_layers * s.d_model, 1), s.n_parts * s.n_tokens,
                s.n_layers * s.d_model, type),
        target(random_floats(s.n_tokens * s.n_layers * s.d_model, 2), s.n_tokens, s.n_layers * s.d_model, target_type),
        bias(random_floats(s.n_layers * s.d_model, 3)),
        centre(random_floats(s.n_layers * s.d_model, 4)),
        standardise(random_floats(s.n_layers * s.d_model, 5)) {}
};

Result run(const Execution& execution, const Inputs& in, float factor, Scalar type) {
  const Shape& s = in.shape;
  const std::int64_t width = s.n_layers * s.d_model;
  const DeviceArray<float> bias(in.bias), centre(in.centre), standardise(in.standardise);
  const DeviceArray<double> a(s.n_layers), b(s.n_layers), c(s.n_layers);
  const DeviceArray<std::byte> workspace(loss_workspace(s.n_tokens, s.n_layers));
  const TestMatrix gradient(std::vector<float>(s.n_tokens * width, 9.0f), s.n_tokens, width, type);
  residual_and_loss(execution, in.partial.view(), s.n_parts, in.target.view(), bias.array(), centre.array(),
                    standardise.array(), s.n_layers, factor, gradient.view(), {a.array(), b.array(), c.array()},
                    workspace.array());
  return {gradient.values(), a.values(), b.values(), c.values()};
}

}  // namespace

TEST_CASE("residual_and_loss agrees with float64, for every storage type and number of parts") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape& s : kShapes)
      for (const Scalar type : {Scalar::fp32, Scalar::bf16})
        for (const Scalar target_type : {Scalar::fp32, Scalar::bf16}) {
          CAPTURE(s.d_model);
          const Inputs in(s, type, target_type);
          const float factor = 0.3f;
          const Result result = run(execution, in, factor, type);
          const std::vector<float> partial = in.partial.values(), target = in.target.values();
          const std::int64_t width = s.n_layers * s.d_model;
          std::vector<double> squared(s.n_layers), standardised(s.n_layers), target_sum(s.n_layers);
          for (std::int64_t n = 0; n < s.n_tokens; ++n)
            for (std::int64_t j = 0; j < width; ++j) {
              double reconstruction = in.bias[j], magnitude = std::abs(in.bias[j]);
              for (std::int64_t p = 0; p < s.n_parts; ++p) {
                reconstruction += partial[(p * s.n_tokens + n) * width + j];
                magnitude += std::abs(partial[(p * s.n_tokens + n) * width + j]);
              }
              const double y = target[n * width + j], e = reconstruction - y;
              const double scale = in.standardise[j];
              squared[j / s.d_model] += e * e;
              standardised[j / s.d_model] += e * e * scale * scale;
              target_sum[j / s.d_model] += (y - in.centre[j]) * (y - in.centre[j]) * scale * scale;
              // n_parts + 1 sums in fp32, the product, and the rounding to storage.
              const double error = (s.n_parts + 2) * kRoundoff * (magnitude + std::abs(y)) * factor;
              const double storage = type == Scalar::bf16 ? kRoundoffBf16 * (std::abs(e) * factor + error) : 0.0;
              REQUIRE(std::abs(result.gradient[n * width + j] - factor * e) <= error + storage);
            }
          for (std::int64_t t = 0; t < s.n_layers; ++t) {
            // e carries up to 7 fp32 roundings of magnitudes below 6; its square, summed in fp64, relative to the sum
            // of squares by Cauchy-Schwarz: 2 * sqrt(sum) * sqrt(terms) * error.
            const double error = 8 * kRoundoff * 6, terms = s.n_tokens * s.d_model;
            // CUDA sums 8 squares of a token in fp32 first, each formed with up to 4 roundings.
            const double group = execution.backend == Backend::cuda ? 16 * kRoundoff : 0.0;
            const auto bound = [&](double sum) {
              return 2 * std::sqrt(sum * terms) * error + terms * error * error + group * sum;
            };
            CHECK(std::abs(result.squared_error[t] - squared[t]) <= bound(squared[t]));
            CHECK(std::abs(result.standardised_error[t] - standardised[t]) <= bound(standardised[t]));
            CHECK(std::abs(result.standardised_target[t] - target_sum[t]) <= bound(target_sum[t]));
          }
        }
  });
}

TEST_CASE("gradient rows are the derivative of the loss") {
  for_each_backend([&](const kernels::Execution& execution) {
    // loss = factor / 2 * sum e^2. Central differences over a single partial value; fp64 sums of fp32 residuals: 1e-3.
    Inputs in({3, 2, 5, 1}, Scalar::fp32, Scalar::fp32);
    const float factor = 0.5f;
    const Result at = run(execution, in, factor, Scalar::fp32);
    std::vector<float> partial = in.partial.values();
    const auto loss = [&] {
      in.partial = TestMatrix(partial, 3, 10, Scalar::fp32);
      const Result result = run(execution, in, factor, Scalar::fp32);
      return factor / 2.0 * (result.squared_error[0] + result.squared_error[1]);
    };
    for (std::size_t i = 0; i < partial.size(); ++i) {
      const float kept = partial[i];
      partial[i] = kept + 0x1p-5f;
      const double high_x = partial[i], high = loss();
      partial[i] = kept - 0x1p-5f;
      const double low_x = partial[i], low = loss();
      partial[i] = kept;
      CHECK(at.gradient[i] == doctest::Approx((high - low) / (high_x - low_x)).epsilon(1e-3));
    }
  });
}

TEST_CASE("the loss is the same bits every time") {
  for_each_backend([&](const kernels::Execution& execution) {
    const Inputs in({33, 5, 31, 4}, Scalar::bf16, Scalar::fp32);
    const Result a = run(execution, in, 0.3f, Scalar::fp32), b = run(execution, in, 0.3f, Scalar::fp32);
    CHECK(a.gradient == b.gradient);
    CHECK(a.squared_error == b.squared_error);
    CHECK(a.standardised_target == b.standardised_target);
  });
}

TEST_CASE("column_sums agrees with float64 over blocks of tokens and of columns") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const std::int64_t rows : {1, 128, 129, 1000})
      for (const std::int64_t columns : {1, 64, 131})
        for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
          const TestMatrix matrix(random_floats(rows * columns, 8), rows, columns, type);
          const DeviceArray<float> out(std::vector<float>(columns, 7.0f));
          column_sums(execution, matrix.view(), out.array());
          const std::vector<float> values = matrix.values(), sums = out.values();
          for (std::int64_t j = 0; j < columns; ++j) {
            double sum = 0, magnitude = 0;
            for (std::int64_t i = 0; i < rows; ++i) {
              sum += values[i * columns + j];
              magnitude += std::abs(values[i * columns + j]);
            }
            // 128 additions inside a block, then one per block.
            REQUIRE(std::abs(sums[j] - sum) <= (128 + rows / 128 + 1) * kRoundoff * magnitude);
          }
        }
  });
}

}  // namespace weft::testing
