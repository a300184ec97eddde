// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/activation/mlp_activation.hpp"

#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr MlpActivation kAll[] = {MlpActivation::gelu, MlpActivation::swiglu, MlpActivation::geglu,
                                  MlpActivation::relu2, MlpActivation::gelu_exact};

/// The activation of g and its derivative, by the formulas of mlp_activation.hpp.
double value64(MlpActivation kind, double g) {
  if (kind == MlpActivation::relu2) return g > 0 ? g * g : 0;
  if (kind == MlpActivation::swiglu) return g / (1 + std::exp(-g));
  if (kind == MlpActivation::gelu_exact) return g / 2 * std::erfc(-g / std::sqrt(2));
  return g / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
}
double slope64(MlpActivation kind, double g) {
  if (kind == MlpActivation::relu2) return g > 0 ? 2 * g : 0;
  if (kind == MlpActivation::swiglu) {
    const double s = 1 / (1 + std::exp(-g));
    return s * (1 + g * (1 - s));
  }
  if (kind == MlpActivation::gelu_exact)
    return std::erfc(-g / std::sqrt(2)) / 2 + g * std::exp(-g * g / 2) / std::sqrt(2 * M_PI);
  const double c = std::sqrt(2 / M_PI), t = std::tanh(c * (g + 0.044715 * g * g * g));
  return (1 + t) / 2 + g / 2 * (1 - t * t) * c * (1 + 0.134145 * g * g);
}

}  // namespace

TEST_CASE("activations agree with float64, forward and backward, for every storage type, dx in place of x or not") {
  for_each_backend([&](const Execution& execution) {
    int margins = 0;
    for (const MlpActivation kind : kAll)
      for (const std::int64_t columns : {1, 40, 257, 3072})
        for (const Scalar type : kRowTypes) {
          CAPTURE(static_cast<int>(kind));
          CAPTURE(columns);
          const std::int64_t rows = columns > 1000 ? 3 : 19, width = is_gated(kind) ? 2 * columns : columns;
          const Margins margin = kMargins[margins++ % 3];
          const Rows x(random_floats(rows * width, 1, 6.0f), rows, width, type, margin),
              dy(random_floats(rows * columns, 2), rows, columns, type, margin);
          const Rows y(rows, columns, type, margin), dx(rows, width, type, margin);
          mlp_activation(execution, kind, x.view(), y.view());
          mlp_activation_backward(execution, kind, x.view(), dy.view(), dx.view());
          const std::vector<float> in = x.values(), gradient = dy.values(), separate = dx.values();
          std::vector<double> want(static_cast<std::size_t>(rows * columns)), want_dx(in.size());
          for (std::int64_t n = 0; n < rows; ++n)
            for (std::int64_t j = 0; j < columns; ++j) {
              const double g = in[n * width + j], d = gradient[n * columns + j];
              const double u = is_gated(kind) ? in[n * width + columns + j] : 1;
              want[n * columns + j] = u * value64(kind, g);
              want_dx[n * width + j] = d * u * slope64(kind, g);
              if (is_gated(kind)) want_dx[n * width + columns + j] = d * value64(kind, g);
            }
          CHECK(relative_error(y.values(), want) <= row_tolerance(type));
          CHECK(relative_error(separate, want_dx) <= row_tolerance(type));
          mlp_activation_backward(execution, kind, x.view(), dy.view(), x.view());
          CHECK(x.values() == separate);
        }
  });
}

TEST_CASE("activations: reference values, and far from zero") {
  for_each_backend([&](const Execution& execution) {
    const auto at = [&](MlpActivation kind, std::vector<float> x) {
      const Rows in(x, 1, std::ssize(x), Scalar::fp32), dy({1.0f}, 1, 1, Scalar::fp32), y(1, 1, Scalar::fp32);
      mlp_activation(execution, kind, in.view(), y.view());
      mlp_activation_backward(execution, kind, in.view(), dy.view(), in.view());
      std::vector<float> out = y.values();
      for (const float d : in.values()) out.push_back(d);
      return out;
    };
    CHECK(relative_error(at(MlpActivation::swiglu, {1, 2}), {1.46211716, 1.85534102, .73105858}) <= 2e-7);
    CHECK(relative_error(at(MlpActivation::gelu, {1}), {.84119199, 1.08296406}) <= 2e-7);
    CHECK(at(MlpActivation::relu2, {-3}) == std::vector<float>{0, 0});
    // A large argument: the identity and 0, without overflow of the exponential or the cube.
    CHECK(at(MlpActivation::gelu, {1e6f}) == std::vector<float>{1e6f, 1});
    CHECK(at(MlpActivation::gelu, {-1e6f}) == std::vector<float>{0, 0});
    CHECK(relative_error(at(MlpActivation::gelu_exact, {1}), {.84134475, 1.08331547}) <= 2e-7);
    CHECK(at(MlpActivation::gelu_exact, {1e6f}) == std::vector<float>{1e6f, 1});
    CHECK(at(MlpActivation::gelu_exact, {-1e6f}) == std::vector<float>{0, 0});
    CHECK(at(MlpActivation::swiglu, {1e6f, 2}) == std::vector<float>{2e6f, 2, 1e6f});
    CHECK(at(MlpActivation::swiglu, {-1e6f, 2}) == std::vector<float>{0, 0, 0});
    CHECK(at(MlpActivation::geglu, {-1e6f, 2}) == std::vector<float>{0, 0, 0});
  });
}

}  // namespace weft::testing
