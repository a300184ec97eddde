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

TEST_CASE("weights of the columns enter the loss and the gradient rows, and nothing else") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape& s : kShapes) {
      CAPTURE(s.d_model);
      const Inputs in(s, Scalar::fp32, Scalar::fp32);
      const std::int64_t width = s.n_layers * s.d_model;
      const std::vector<float> spread = random_floats(width, 6);
      const DeviceArray<float> spreads(spread), weight(width), bias(in.bias), centre(in.centre),
          standardise(in.standardise);
      const DeviceArray<double> a(s.n_layers), b(s.n_layers), c(s.n_layers);
      const DeviceArray<std::byte> workspace(loss_workspace(s.n_tokens, s.n_layers));
      const TestMatrix gradient(std::vector<float>(s.n_tokens * width), s.n_tokens, width, Scalar::fp32);
      square(execution, spreads.array(), weight.array());
      weighted_residual_and_loss(execution, in.partial.view(), s.n_parts, in.target.view(), bias.array(),
                                 centre.array(), standardise.array(), weight.array(), s.n_layers, 0.3f, gradient.view(),
                                 {a.array(), b.array(), c.array()}, workspace.array());
      // The same residuals, whose gradient rows with a factor of 1 are exact.
      const Result plain = run(execution, in, 1.0f, Scalar::fp32);
      const std::vector<float> weights = weight.values(), rows = gradient.values();
      std::vector<double> expected(s.n_layers);
      for (std::int64_t i = 0; i < s.n_tokens * width; ++i) {
        const double w = weights[i % width], e = plain.gradient[i];
        REQUIRE(std::abs(w - double(spread[i % width]) * double(spread[i % width])) <= kRoundoff * w);
        // Two products.
        REQUIRE(std::abs(rows[i] - 0.3f * w * e) <= 3 * kRoundoff * std::abs(0.3 * w * e));
        expected[i % width / s.d_model] += w * e * e;
      }
      const std::vector<double> error = a.values(), standardised = b.values(), targets = c.values();
      for (std::int64_t t = 0; t < s.n_layers; ++t) {
        CHECK(error[t] == doctest::Approx(expected[t]).epsilon(1e-12));  // sums in float64
        // On a GPU the other kernel has another order of sums, partly in fp32.
        CHECK(standardised[t] == doctest::Approx(plain.standardised_error[t]).epsilon(1e-5));
        CHECK(targets[t] == doctest::Approx(plain.standardised_target[t]).epsilon(1e-5));
      }
    }
  });
}

TEST_CASE("weights of the unexplained variance are N d over the variance of all parts") {
  for_each_backend([&](const kernels::Execution& execution) {
    const std::int64_t n_layers = 3, d = 37, width = n_layers * d, parts[] = {1, 5, 30}, n = 36;
    std::vector<float> target = random_floats(n * width, 1), centre = random_floats(width, 2);
    for (std::int64_t i = 0; i < n * width; ++i)
      if (i % width >= 2 * d) target[i] = 0.25f;  // the last layer is constant
    const DeviceArray<float> centres(centre), weight(width);
    const DeviceArray<double> moments(std::ssize(parts) * 2 * width);
    std::int64_t begin = 0;
    for (std::int64_t part = 0; part < std::ssize(parts); begin += parts[part], ++part) {
      const std::vector<float> rows(target.begin() + begin * width, target.begin() + (begin + parts[part]) * width);
      const TestMatrix own(rows, parts[part], width, Scalar::fp32);
      target_moments(execution, own.view(), centres.array(), {moments.array().data + part * 2 * width, 2 * width});
    }
    unexplained_weights(execution, moments.array(), std::ssize(parts), n, d, weight.array());
    const std::vector<float> found = weight.values();
    for (std::int64_t t = 0; t < n_layers; ++t) {
      double variance = 0;
      for (std::int64_t j = t * d; j < (t + 1) * d; ++j) {
        double mean = 0;
        for (std::int64_t i = 0; i < n; ++i) mean += target[i * width + j] / double(n);
        for (std::int64_t i = 0; i < n; ++i)
          variance += (target[i * width + j] - mean) * (target[i * width + j] - mean);
      }
      // Moments in float64, the weight in fp32.
      CHECK(found[t * d] == doctest::Approx(t < 2 ? double(n) * d / variance : 0.0).epsilon(1e-6));
      for (std::int64_t j = t * d; j < (t + 1) * d; ++j) CHECK(found[j] == found[t * d]);
    }
  });
}

}  // namespace weft::testing
