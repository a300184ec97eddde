// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/linear/linear.hpp"

#include "kernels/gemm/gemm.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

/// W [outputs, inputs] or its transpose, and a bias, on the device and in float64.
struct Weights {
  std::int64_t outputs, inputs;
  bool transposed;
  Rows stored;
  std::vector<float> bias;
  DeviceArray<float> device_bias;
  DeviceArray<bf16> rounded;

  Weights(std::int64_t outputs_, std::int64_t inputs_, bool transposed_, Scalar type)
      : outputs(outputs_),
        inputs(inputs_),
        transposed(transposed_),
        stored(random_floats(outputs * inputs, 1), transposed ? inputs : outputs, transposed ? outputs : inputs, type),
        bias(random_floats(outputs, 2)),
        device_bias(bias),
        rounded(outputs) {}
  LinearWeights view(bool with_rounded) const {
    LinearWeights weights{.matrix = stored.view(), .transposed = transposed, .bias = device_bias.array()};
    if (with_rounded) weights.rounded_bias = rounded.array();
    return weights;
  }
  void round(const Execution& execution) const {
    const DeviceArray<RoundedCopy> copies(std::vector<RoundedCopy>{{device_bias.data(), rounded.data(), outputs}});
    round_copies(execution, copies.array(), outputs);
  }
  double at(const std::vector<float>& values, std::int64_t out, std::int64_t in) const {
    return values[transposed ? in * outputs + out : out * inputs + in];
  }
};

struct Shape {
  std::int64_t rows, outputs, inputs;
};
constexpr Shape kShapes[] = {{1, 1, 1}, {37, 65, 33}, {128, 192, 64}, {300, 64, 256}};

bool is_aligned(const Shape& shape) { return shape.outputs % 8 == 0 && shape.inputs % 8 == 0; }

/// True if a product of these bf16 rows is formed by the kernel for few rows, where the GPU has it.
bool are_few_rows(const Shape& shape, bool transposed) {
  return shape.rows <= 64 && shape.inputs % 8 == 0 && (!transposed || shape.outputs % 8 == 0);
}

/// norm(x) of rows [rows, columns] as defined, rounded to fp32.
std::vector<float> exactly_normalised(const std::vector<float>& x, std::int64_t rows, const NormWeights& norm,
                                      const std::vector<float>& gamma, const std::vector<float>& beta) {
  const std::int64_t columns = std::ssize(x) / rows;
  std::vector<float> out;
  for (std::int64_t n = 0; n < rows; ++n) {
    const float* const row = x.data() + n * columns;
    double mean = 0, variance = 0;
    if (norm.kind == Norm::layer)
      for (std::int64_t i = 0; i < columns; ++i) mean += static_cast<double>(row[i]) / static_cast<double>(columns);
    for (std::int64_t i = 0; i < columns; ++i)
      variance +=
          (static_cast<double>(row[i]) - mean) * (static_cast<double>(row[i]) - mean) / static_cast<double>(columns);
    for (std::int64_t i = 0; i < columns; ++i)
      out.push_back(static_cast<float>(static_cast<double>(gamma[i]) * (static_cast<double>(row[i]) - mean) /
                                           std::sqrt(variance + static_cast<double>(norm.epsilon)) +
                                       (norm.bias.data != nullptr ? static_cast<double>(beta[i]) : 0.0)));
  }
  return out;
}

device::Buffer<std::byte> workspace_of(const Shape& shape, Scalar type) {
  return device::Buffer<std::byte>(std::max(gemm_workspace(type, type, type, shape.rows, shape.outputs, shape.inputs),
                                            gemm_workspace(type, type, type, shape.rows, shape.inputs, shape.outputs)));
}

/// The tanh form of the GELU, and its slope (mlp_activation.hpp).
double gelu(double x) { return x / 2 * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x) {
  const double c = std::sqrt(2 / std::acos(-1.0)), t = std::tanh(c * (x + 0.044715 * x * x * x));
  return (1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
}

/// Up to three roundings to bf16: of the sums, of the bias or the slope's product, of the result.
double tolerance(Scalar type) { return type == Scalar::fp32 ? 2e-6 : 8e-3; }

}  // namespace

TEST_CASE("a product with its bias agrees with float64, with the bias in fp32 and in bf16") {
  for_each_backend([&](const Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const Scalar type : {Scalar::fp32, Scalar::bf16})
        for (const bool transposed : {false, true})
          for (const bool with_rounded : {false, true}) {
            CAPTURE(shape.outputs);
            CAPTURE(transposed);
            CAPTURE(with_rounded);
            const Weights weights(shape.outputs, shape.inputs, transposed, type);
            weights.round(execution);
            const Rows x(random_floats(shape.rows * shape.inputs, 3), shape.rows, shape.inputs, type),
                y(shape.rows, shape.outputs, type);
            const device::Buffer<std::byte> workspace = workspace_of(shape, type);
            linear(execution, weights.view(with_rounded), x.view(), y.view(), workspace.array());
            const std::vector<float> stored = weights.stored.values(), inputs = x.values();
            std::vector<double> want;
            for (std::int64_t n = 0; n < shape.rows; ++n)
              for (std::int64_t o = 0; o < shape.outputs; ++o) {
                double sum = weights.bias[o];
                for (std::int64_t i = 0; i < shape.inputs; ++i)
                  sum += weights.at(stored, o, i) * inputs[n * shape.inputs + i];
                want.push_back(sum);
              }
            CHECK(relative_error(y.values(), want) <= tolerance(type));
          }
  });
}

TEST_CASE("products of few rows: all sizes agree with float64, and a row does not depend on the number of rows") {
  // Two tiles, one short; parts of the inputs; more chunks than stages; many outputs; no whole words.
  constexpr std::int64_t kMany = 16392;
  const Shape shapes[] = {{64, 40, 72},    {64, 768, 3072},  {64, 2304, 768},  {9, 32, 8},       {8, 24, 4096},
                          {8, kMany, 264}, {16, kMany, 264}, {17, kMany, 136}, {64, kMany, 264}, {5, 13, 64}};
  for_each_backend([&](const Execution& execution) {
    // Of GPUs before compute capability 9.0 the dense library forms all products.
    const Weights least(8, 8, false, Scalar::bf16);
    const Rows least_x(random_floats(8, 3), 1, 8, Scalar::bf16), least_y(1, 8, Scalar::bf16);
    const bool has_kernel = linear_activated(execution, least.view(false), least_x.view(), least_y.view(),
                                             MlpActivation::relu2, least_y.view());
    if (execution.backend == Backend::portable) CHECK(!has_kernel);
    for (const Shape& shape : shapes)
      for (const bool transposed : {false, true}) {
        CAPTURE(shape.rows);
        CAPTURE(shape.outputs);
        CAPTURE(transposed);
        constexpr Scalar kType = Scalar::bf16;
        // Rows begin at multiples of four elements, those of many outputs at whole words.
        const Margins in_fours = shape.outputs == kMany ? Margins{8, 16} : Margins{4, 4 + (4 - shape.outputs % 4) % 4};
        const Weights weights(shape.outputs, shape.inputs, transposed, kType);
        const Rows x(random_floats(shape.rows * shape.inputs, 3), shape.rows, shape.inputs, kType, {8, 16}),
            y(shape.rows, shape.outputs, kType, in_fours), one(1, shape.outputs, kType, in_fours),
            hidden(shape.rows, shape.outputs, kType, in_fours), fused(shape.rows, shape.outputs, kType, in_fours),
            separate(shape.rows, shape.outputs, kType);
        const device::Buffer<std::byte> workspace = workspace_of(shape, kType);
        linear(execution, weights.view(false), x.view(), y.view(), workspace.array());
        const std::vector<float> stored = weights.stored.values(), inputs = x.values(), got = y.values();
        // Rows 0, last and one between: the test is not to take longer than the kernels.
        for (const std::int64_t n : {std::int64_t{0}, shape.rows / 2, shape.rows - 1}) {
          std::vector<double> want;
          for (std::int64_t o = 0; o < shape.outputs; ++o) {
            double sum = weights.bias[o];
            for (std::int64_t i = 0; i < shape.inputs; ++i)
              sum += weights.at(stored, o, i) * inputs[n * shape.inputs + i];
            want.push_back(sum);
          }
          const std::vector<float> row(got.begin() + n * shape.outputs, got.begin() + (n + 1) * shape.outputs);
          CHECK(relative_error(row, want) <= tolerance(kType));
          if (!has_kernel || !are_few_rows(shape, transposed)) continue;
          linear(execution, weights.view(false), x.view().rows_from(n, 1), one.view(), workspace.array());
          CHECK(one.values() == row);
        }
        for (const MlpActivation activation : {MlpActivation::gelu, MlpActivation::relu2}) {
          const bool is_fused =
              linear_activated(execution, weights.view(false), x.view(), hidden.view(), activation, fused.view());
          CHECK(is_fused == (has_kernel && are_few_rows(shape, transposed)));
          if (!is_fused) continue;
          mlp_activation(execution, activation, hidden.view(), separate.view());
          CHECK(hidden.values() == got);
          CHECK(fused.values() == separate.values());
        }
      }
  });
}

TEST_CASE("products that add to the residual stream and apply the norm of what they read") {
  // The last group of columns short or not; several parts; more chunks than stages; gated and not; one row and many.
  // More than 32 rows, not all of a tile, the last tile and chunk short: in four and in eight parts.
  struct Size {
    std::int64_t rows, width, inner;
  };
  for_each_backend([&](const Execution& execution) {
    for (const Size& size : {Size{1, 8, 16}, Size{64, 768, 3072}, Size{8, 776, 96}, Size{9, 2048, 40},
                             Size{50, 776, 2008}, Size{33, 1032, 1000}})
      for (const Norm kind : {Norm::layer, Norm::rms})
        for (const bool transposed : {false, true}) {
          CAPTURE(size.rows);
          CAPTURE(size.width);
          CAPTURE(transposed);
          constexpr Scalar kType = Scalar::bf16;
          const auto [rows, width, inner] = size;
          const Weights down(width, inner, transposed, kType), up(inner, width, transposed, kType);
          const bool joins = joins_norms(execution, up.view(false), rows, kType);
          CHECK(joins == joins_norms(execution, down.view(false), rows, kType));
          CHECK(!joins_norms(execution, up.view(false), kMostFewRows + 1, kType));
          if (execution.backend == Backend::portable) CHECK(!joins);
          if (!joins) continue;
          const Rows x(random_floats(rows * inner, 3), rows, inner, kType, {8, 16}),
              residual(random_floats(rows * width, 4, 3.0f), rows, width, kType), sum(rows, width, kType),
              product(rows, width, kType), normalised(rows, width, kType), y(rows, inner, kType),
              activated(rows, inner, kType), separate_activated(rows, inner, kType), one_sum(1, width, kType),
              one(1, inner, kType);
          const std::int64_t groups = moment_groups(width);
          const DeviceArray<Moments> moments(rows * groups), one_moments(groups);
          const DeviceArray<float> gamma(random_floats(width, 5)), beta(random_floats(width, 6)), mean(rows),
              inverse(rows);
          const NormWeights norm{kind, gamma.array(), kind == Norm::layer ? beta.array() : Array<float>{}, 1e-5f};
          const DeviceArray<bf16> joined_weights(inner * width);
          const DeviceArray<float> joined_bias(inner), joined_sums(inner);
          const JoinedNorm joined = join_norm(execution, up.view(false), norm, joined_weights.matrix(inner, width),
                                              joined_bias.array(), joined_sums.array());
          linear_added(execution, down.view(false), x.view(), residual.view(), sum.view(), moments.array());
          linear_of_norm(execution, joined, moments.array(), sum.view(), y.view(), {});
          linear_of_norm(execution, joined, moments.array(), sum.view(), activated.view(), MlpActivation::gelu);

          linear(execution, down.view(false), x.view(), product.view(), {});
          norm_forward(execution, norm, residual.view(), product.view(), product.view(), normalised.view(),
                       {kind == Norm::layer ? mean.array() : Array<float>{}, inverse.array()});
          CHECK(sum.values() == product.values());
          // Products of the weights of the norm and W are rounded instead of normalised elements.
          const std::vector<float> normal = exactly_normalised(sum.values(), rows, norm, gamma.values(), beta.values()),
                                   stored = up.stored.values();
          std::vector<double> want;
          for (std::int64_t n = 0; n < rows; ++n)
            for (std::int64_t o = 0; o < inner; ++o) {
              double product_of_row = static_cast<double>(up.bias[o]);
              for (std::int64_t i = 0; i < width; ++i)
                product_of_row += static_cast<double>(normal[n * width + i]) * up.at(stored, o, i);
              want.push_back(product_of_row);
            }
          CHECK(relative_error(y.values(), want) <= row_tolerance(kType));
          // Of the product as stored.
          mlp_activation(execution, MlpActivation::gelu, y.view(), separate_activated.view());
          CHECK(activated.values() == separate_activated.values());
          // What a later attention reads may be requested meanwhile.
          const DeviceArray<CachedSequence> sequences(
              std::vector<CachedSequence>(static_cast<std::size_t>(rows), {.own_begin = 7, .end = 50}));
          const DeviceArray<std::int32_t> positions(std::vector<std::int32_t>(static_cast<std::size_t>(rows), 40));
          const DeviceArray<std::byte> keys(50 * 96), values(50 * 96);
          const CachedAhead ahead{.sequences = sequences.data(),
                                  .positions = positions.data(),
                                  .keys = keys.data(),
                                  .values = values.data(),
                                  .stride = 96,
                                  .bytes = 80,
                                  .rows = static_cast<std::int32_t>(rows),
                                  .first = 4,
                                  .count = 60};
          const std::vector<float> sum_without = sum.values(), y_without = y.values();
          linear_added(execution, down.view(false), x.view(), residual.view(), sum.view(), moments.array(), ahead);
          linear_of_norm(execution, joined, moments.array(), sum.view(), y.view(), {}, ahead);
          CHECK(sum.values() == sum_without);
          CHECK(y.values() == y_without);
          // The last row alone.
          linear_added(execution, down.view(false), x.view().rows_from(rows - 1, 1),
                       residual.view().rows_from(rows - 1, 1), one_sum.view(), one_moments.array());
          linear_of_norm(execution, joined, one_moments.array(), one_sum.view(), one.view(), {});
          const std::vector<float> all = y.values();
          CHECK(std::equal(all.end() - inner, all.end(), one.values().begin()));
        }
  });
}

TEST_CASE("a product joined with a norm: W', b' and s as defined") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : {Scalar::fp32, Scalar::bf16})
      for (const bool transposed : {false, true})
        for (const bool with_bias : {false, true}) {
          constexpr std::int64_t kOutputs = 40, kInputs = 600;
          const Weights weights(kOutputs, kInputs, transposed, type);
          const std::vector<float> gamma = random_floats(kInputs, 5), beta = random_floats(kInputs, 6);
          const DeviceArray<float> device_gamma(gamma), device_beta(beta), bias(kOutputs), sums(kOutputs);
          const DeviceArray<bf16> joined(kOutputs * kInputs);
          LinearWeights view = weights.view(false);
          if (!with_bias) view.bias = {};
          const JoinedNorm norm =
              join_norm(execution, view,
                        {Norm::layer, device_gamma.array(), with_bias ? device_beta.array() : Array<float>{}, 1e-5f},
                        joined.matrix(kOutputs, kInputs), bias.array(), sums.array());
          CHECK(!norm.weights.transposed);
          const std::vector<float> stored = weights.stored.values(), b = bias.values(), s = sums.values();
          const std::vector<bf16> w = joined.values();
          std::vector<double> want_bias, want_sums;
          bool rounded = true;
          for (std::int64_t o = 0; o < kOutputs; ++o) {
            double of_bias = with_bias ? static_cast<double>(weights.bias[o]) : 0.0, sum = 0;
            for (std::int64_t i = 0; i < kInputs; ++i) {
              const float weight = static_cast<float>(weights.at(stored, o, i));
              rounded = rounded && w[o * kInputs + i].bits == to_bf16(weight * gamma[i]).bits;
              sum += static_cast<double>(float{w[o * kInputs + i]});
              if (with_bias) of_bias += static_cast<double>(weight) * static_cast<double>(beta[i]);
            }
            want_bias.push_back(of_bias);
            want_sums.push_back(sum);
          }
          CHECK(rounded);
          CHECK(relative_error(b, want_bias) <= 1e-5);  // sums of 600 terms in fp32
          CHECK(relative_error(s, want_sums) <= 1e-5);
        }
  });
}

TEST_CASE("a product with its bias and a GELU agrees with float64") {
  for_each_backend([&](const Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const Scalar type : {Scalar::fp32, Scalar::bf16})
        for (const bool transposed : {false, true}) {
          CAPTURE(shape.outputs);
          CAPTURE(transposed);
          const Weights weights(shape.outputs, shape.inputs, transposed, type);
          weights.round(execution);
          const Rows x(random_floats(shape.rows * shape.inputs, 3), shape.rows, shape.inputs, type),
              y(shape.rows, shape.outputs, type);
          const device::Buffer<std::byte> workspace = workspace_of(shape, type);
          // Of aligned bf16 rows the dense library of a GPU forms it, if it gets the bias in bf16.
          CHECK(!linear_gelu(execution, weights.view(false), x.view(), y.view(), workspace.array()));
          const bool is_fused = linear_gelu(execution, weights.view(true), x.view(), y.view(), workspace.array());
          CHECK(is_fused == (execution.backend == Backend::cuda && type == Scalar::bf16 && is_aligned(shape)));
          if (!is_fused) {
            CHECK(std::ranges::all_of(y.values(), [](float value) { return std::isnan(value); }));
            continue;
          }
          const std::vector<float> stored = weights.stored.values(), inputs = x.values();
          std::vector<double> want;
          for (std::int64_t n = 0; n < shape.rows; ++n)
            for (std::int64_t o = 0; o < shape.outputs; ++o) {
              double sum = weights.bias[o];
              for (std::int64_t i = 0; i < shape.inputs; ++i)
                sum += weights.at(stored, o, i) * inputs[n * shape.inputs + i];
              want.push_back(gelu(sum));
            }
          CHECK(relative_error(y.values(), want) <= tolerance(type));
        }
  });
}

TEST_CASE("the gradient before a GELU from one product agrees with float64 and with the separate kernels") {
  for_each_backend([&](const Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const Scalar type : {Scalar::fp32, Scalar::bf16})
        for (const bool transposed : {false, true}) {
          CAPTURE(shape.outputs);
          CAPTURE(transposed);
          const Weights weights(shape.outputs, shape.inputs, transposed, type);
          const Rows dy(random_floats(shape.rows * shape.outputs, 3), shape.rows, shape.outputs, type),
              hidden(random_floats(shape.rows * shape.inputs, 4, 3.0f), shape.rows, shape.inputs, type),
              fused(shape.rows, shape.inputs, type), separate(shape.rows, shape.inputs, type);
          const device::Buffer<std::byte> workspace = workspace_of(shape, type);
          const bool is_fused = linear_gelu_backward(execution, weights.view(false), dy.view(), hidden.view(),
                                                     fused.view(), workspace.array());
          linear_backward(execution, weights.view(false), dy.view(), separate.view(), workspace.array());
          mlp_activation_backward(execution, MlpActivation::gelu, hidden.view(), separate.view(), separate.view());
          const std::vector<float> stored = weights.stored.values(), gradient = dy.values(), x = hidden.values();
          std::vector<double> want;
          for (std::int64_t n = 0; n < shape.rows; ++n)
            for (std::int64_t i = 0; i < shape.inputs; ++i) {
              double sum = 0;
              for (std::int64_t o = 0; o < shape.outputs; ++o)
                sum += gradient[n * shape.outputs + o] * weights.at(stored, o, i);
              want.push_back(sum * gelu_slope(x[n * shape.inputs + i]));
            }
          CHECK(relative_error(separate.values(), want) <= tolerance(type));
          // Of aligned bf16 rows the dense library of a GPU forms it.
          CHECK(is_fused == (execution.backend == Backend::cuda && type == Scalar::bf16 && is_aligned(shape)));
          if (is_fused)
            CHECK(relative_error(fused.values(), want) <= tolerance(type));
          else
            CHECK(std::ranges::all_of(fused.values(), [](float value) { return std::isnan(value); }));
        }
  });
}

TEST_CASE("rounded copies round to nearest, each array by itself") {
  for_each_backend([&](const Execution& execution) {
    const std::vector<float> a = random_floats(700, 1), b = random_floats(3, 2);
    const DeviceArray<float> from_a(a), from_b(b);
    const DeviceArray<bf16> to(std::vector<bf16>(704));
    const DeviceArray<RoundedCopy> copies(
        std::vector<RoundedCopy>{{from_a.data(), to.data(), 700}, {from_b.data(), to.data() + 700, 3}});
    round_copies(execution, copies.array(), 700);
    const std::vector<bf16> got = to.values();
    for (std::size_t i = 0; i < 703; ++i) REQUIRE(float{got[i]} == float{to_bf16(i < 700 ? a[i] : b[i - 700])});
    CHECK(float{got[703]} == 0.0f);
  });
}

}  // namespace weft::testing
