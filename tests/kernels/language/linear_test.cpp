// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/linear/linear.hpp"

#include "kernels/gemm/gemm.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/linear/few_rows_cuda.hpp"
#include "kernels/language/linear/packed_rows_cuda.hpp"
#include "kernels/language/norm/norm.hpp"
#include "kernels/language/residual/residual.hpp"
#include "kernels/optimize/packed_weights.hpp"
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

/// True if the kernel for few rows forms this product.
bool forms_few_rows(const Execution& execution, const LinearWeights& weights, const LinearInput& x,
                    const LinearOutput& y) {
  if constexpr (kCudaBuild) return execution.backend == Backend::cuda && cuda::fits_few_rows(weights, x, y);
  return false;
}

/// True if the kernel that reads the codes of packed weights forms this product.
bool reads_codes(const Execution& execution, const LinearWeights& weights, AnyMatrix x, AnyMatrix y) {
  if constexpr (kCudaBuild) return execution.backend == Backend::cuda && cuda::fits_packed_rows(weights, x, y);
  return false;
}

/// True for sizes that only GPUs are to form: the portable kernels have no tiles that depend on them.
bool is_slow(const Execution& execution, const Shape& shape) {
  return execution.backend == Backend::portable && shape.outputs * shape.inputs > 1024 * 1024;
}

/// A norm of `columns` columns with weights about 1 and, for Norm::layer, biases.
struct NormParameters {
  DeviceArray<float> weight, bias;
  NormWeights values;

  NormParameters(std::int64_t columns, Norm kind) : weight(about_one(columns)), bias(random_floats(columns, 6)) {
    values.kind = kind;
    values.weight = weight.array();
    if (kind == Norm::layer) values.bias = bias.array();
  }
  static std::vector<float> about_one(std::int64_t columns) {
    std::vector<float> values = random_floats(columns, 5);
    for (float& value : values) value = 1.0f + 0.5f * value;
    return values;
  }
};

/// Residual rows with means of some standard deviations.
std::vector<float> residual_rows(std::int64_t rows, std::int64_t columns) {
  std::vector<float> values = random_floats(rows * columns, 4);
  for (std::int64_t i = 0; i < rows * columns; ++i)
    values[static_cast<std::size_t>(i)] += i / columns == rows / 2 ? 20.0f : static_cast<float>(i / columns % 5 - 2);
  return values;
}

/// Checks a product of a normalised row h against float64, at some of the outputs. weight ∘ h or norm(h) is rounded to
/// bf16, and so is the result: each by less than 2^-9, about half of it on average.
void check_normalised_row(const NormParameters& norm, Norm kind, std::span<const float> h, const Weights& weights,
                          const std::vector<float>& stored, std::span<const float> got) {
  const std::vector<float> gamma = norm.weight.values(), beta = norm.bias.values();
  const auto n = static_cast<double>(h.size());
  double mean = 0, squares = 0, error = 0, allowed = 0;
  if (kind == Norm::layer)
    for (const float x : h) mean += static_cast<double>(x) / n;
  for (const float x : h) squares += std::pow(static_cast<double>(x) - mean, 2);
  const double r = 1 / std::sqrt(squares / n + static_cast<double>(norm.values.epsilon));
  const std::int64_t step = std::max<std::int64_t>(1, std::ssize(got) / 96);
  for (std::int64_t o = 0; o < std::ssize(got); o += step) {
    double sum = weights.bias[static_cast<std::size_t>(o)], rounded = 0;
    for (std::size_t i = 0; i < h.size(); ++i) {
      const double scaled = r * static_cast<double>(gamma[i]) * static_cast<double>(h[i]),
                   normalised = scaled - r * static_cast<double>(gamma[i]) * mean +
                                (kind == Norm::layer ? static_cast<double>(beta[i]) : 0),
                   w = weights.at(stored, o, static_cast<std::int64_t>(i));
      sum += normalised * w;
      rounded += (scaled * scaled + normalised * normalised) * w * w;
    }
    error += std::pow(static_cast<double>(got[static_cast<std::size_t>(o)]) - sum, 2);
    allowed += (rounded + sum * sum) / (512.0 * 512.0);
  }
  CHECK(error <= allowed);
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
    // Of GPUs before compute capability 9.0, and on the host, the dense library forms all products.
    const auto has_kernel = [&](const LinearWeights& weights, AnyMatrix x, AnyMatrix y) {
      if constexpr (kCudaBuild) return execution.backend == Backend::cuda && cuda::fits_few_rows(weights, x, y);
      return false;
    };
    const Weights least(8, 8, false, Scalar::bf16);
    const Rows least_x(random_floats(8, 3), 1, 8, Scalar::bf16), least_y(1, 8, Scalar::bf16);
    const bool has_kernels = has_kernel(least.view(false), least_x.view(), least_y.view());
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
          const bool few = has_kernel(weights.view(false), x.view(), y.view());
          CHECK(few == (has_kernels && are_few_rows(shape, transposed)));
          if (!few) continue;
          linear(execution, weights.view(false), x.view().rows_from(n, 1), one.view(), workspace.array());
          CHECK(one.values() == row);
        }
        for (const MlpActivation activation : {MlpActivation::gelu, MlpActivation::relu2}) {
          linear_activated(execution, weights.view(false), x.view(), hidden.view(), activation, fused.view(),
                           workspace.array());
          mlp_activation(execution, activation, y.view(), separate.view());
          CHECK(fused.values() == separate.values());
        }
      }
  });
}

TEST_CASE("a product that adds the residual stream has the bits of separate kernels, and leaves the moments of it") {
  // Of the second product of a sublayer: more chunks than stages; a short group of columns; tiles of 64 outputs.
  const Shape shapes[] = {{1, 768, 768}, {1, 768, 3072}, {1, 1600, 1600}, {1, 4096, 4096}, {1, 72, 40}, {1, 1608, 264}};
  for_each_backend([&](const Execution& execution) {
    for (const Shape& shape : shapes)
      for (const bool transposed : {false, true}) {
        if (is_slow(execution, shape)) continue;
        const Weights weights(shape.outputs, shape.inputs, transposed, Scalar::bf16);
        for (const std::int64_t rows : {1, 7, 8, 9, 32, 33, 64}) {
          CAPTURE(rows);
          CAPTURE(shape.outputs);
          CAPTURE(shape.inputs);
          CAPTURE(transposed);
          constexpr Scalar kType = Scalar::bf16;
          constexpr Margins kInFours{4, 4};
          const Rows x(random_floats(rows * shape.inputs, 3), rows, shape.inputs, kType, {8, 16}),
              residual(residual_rows(rows, shape.outputs), rows, shape.outputs, kType, kInFours),
              joined(rows, shape.outputs, kType, kInFours), separate(rows, shape.outputs, kType, kInFours);
          const std::int64_t groups = moment_groups(shape.outputs);
          const DeviceArray<Moments> moments(std::vector<Moments>(static_cast<std::size_t>(rows * groups)));
          const device::Buffer<std::byte> workspace = workspace_of({rows, shape.outputs, shape.inputs}, kType);
          const DeviceArray<float> weight(NormParameters::about_one(shape.outputs));
          const Rows scaled(rows, shape.outputs, kType, kInFours);
          const LinearOutput sum{joined.view(), residual.view(), moments.array(), {weight.array(), scaled.view()}};
          linear(execution, weights.view(false), x.view(), sum, workspace.array());
          linear(execution, weights.view(false), x.view(), separate.view(), workspace.array());
          CHECK(forms_few_rows(execution, weights.view(false), x.view(), sum) ==
                forms_few_rows(execution, weights.view(false), x.view(), separate.view()));
          add_rows(execution, residual.view(), separate.view(), separate.view());
          const std::vector<float> stored = joined.values();
          CHECK(stored == separate.values());
          const std::vector<float> weight_values = weight.values();
          std::vector<float> products;
          for (std::size_t i = 0; i < stored.size(); ++i)
            products.push_back(stored[i] * weight_values[i % static_cast<std::size_t>(shape.outputs)]);
          CHECK(scaled.values() == Rows(products, rows, shape.outputs, kType).values());
          const std::vector<Moments> got = moments.values();
          std::vector<float> means, squares;
          std::vector<double> want_means, want_squares;
          for (std::int64_t n = 0; n < rows; ++n)
            for (std::int64_t group = 0; group < groups; ++group) {
              const std::int64_t first = group * kMomentColumns, end = std::min(first + kMomentColumns, shape.outputs);
              double mean = 0, about_mean = 0;
              for (std::int64_t o = first; o < end; ++o)
                mean += static_cast<double>(stored[n * shape.outputs + o]) / static_cast<double>(end - first);
              for (std::int64_t o = first; o < end; ++o)
                about_mean += std::pow(static_cast<double>(stored[n * shape.outputs + o]) - mean, 2);
              means.push_back(got[n * groups + group].mean);
              squares.push_back(got[n * groups + group].squares);
              want_means.push_back(mean);
              want_squares.push_back(about_mean);
            }
          // Sums of 32 terms in fp32; the error of a mean is squared in the sum about it.
          CHECK(relative_error(means, want_means) <= 1e-6);
          CHECK(relative_error(squares, want_squares) <= 1e-5);
        }
      }
  });
}

TEST_CASE("products of normalised rows agree with float64, and a row does not depend on the number of rows") {
  // Of the first product of a sublayer; a narrow one; one with many outputs, whose norm is a kernel of its own.
  const Shape shapes[] = {{1, 2304, 768},   {1, 3072, 768}, {1, 4800, 1600}, {1, 4096, 4096},
                          {1, 12288, 4096}, {1, 72, 264},   {1, 16392, 264}};
  for_each_backend([&](const Execution& execution) {
    for (const Shape& shape : shapes) {
      if (is_slow(execution, shape)) continue;
      const Weights weights(shape.outputs, shape.inputs, false, Scalar::bf16);
      const std::vector<float> stored = weights.stored.values();
      for (const Norm kind : {Norm::layer, Norm::rms}) {
        const NormParameters norm(shape.inputs, kind);
        for (const std::int64_t rows : {1, 7, 8, 9, 32, 33, 64}) {
          CAPTURE(rows);
          CAPTURE(shape.outputs);
          CAPTURE(shape.inputs);
          CAPTURE(kind == Norm::layer);
          constexpr Scalar kType = Scalar::bf16;
          const Rows h(residual_rows(rows, shape.inputs), rows, shape.inputs, kType, {8, 16}),
              memory(rows, shape.inputs, kType), joined(rows, shape.outputs, kType),
              separate(rows, shape.outputs, kType), one(1, shape.outputs, kType), hidden(rows, shape.outputs, kType),
              activated(rows, shape.outputs, kType);
          const std::int64_t groups = moment_groups(shape.inputs);
          const DeviceArray<Moments> moments(std::vector<Moments>(static_cast<std::size_t>(rows * groups)));
          LinearWeights view = weights.view(false);
          const DeviceArray<float> sums(shape.outputs), constants(shape.outputs);
          form_norm_terms(execution, view, norm.values, sums.array(), constants.array());
          view.norm_terms = {sums.array(), constants.array()};
          const DeviceArray<float> mean(rows), inverse(rows);
          const NormStatistics statistics{kind == Norm::layer ? mean.array() : Array<float>{}, inverse.array()};
          const device::Buffer<std::byte> workspace = workspace_of({rows, shape.outputs, shape.inputs}, kType);
          form_moments(execution, h.view(), moments.array(), {norm.values.weight, memory.view()});
          const LinearInput x{h.view(), norm.values, moments.array(), memory.view(), statistics};
          linear(execution, view, x, joined.view(), workspace.array());
          const std::vector<float> got = joined.values(), residual = h.values();
          const bool few = forms_few_rows(execution, view, x, joined.view());
          const bool has_kernel = forms_few_rows(execution, view, h.view(), joined.view());
          CHECK(few == (has_kernel && shape.outputs < 16384));
          CHECK(!forms_few_rows(execution, weights.view(false), x, joined.view()) == (!few || kind == Norm::layer));
          for (const std::int64_t n : {std::int64_t{0}, rows / 2, rows - 1})
            check_normalised_row(norm, kind, std::span(residual).subspan(n * shape.inputs, shape.inputs), weights,
                                 stored, std::span(got).subspan(n * shape.outputs, shape.outputs));
          if (has_kernel)
            for (const std::int64_t n : {std::int64_t{0}, rows / 2, rows - 1}) {
              const LinearInput row{h.view().rows_from(n, 1),
                                    norm.values,
                                    {moments.data() + n * groups, groups},
                                    memory.view().rows_from(n, 1),
                                    statistics};
              linear(execution, view, row, one.view(), workspace.array());
              CHECK(one.values() ==
                    std::vector<float>(got.begin() + n * shape.outputs, got.begin() + (n + 1) * shape.outputs));
            }
          for (const MlpActivation activation : {MlpActivation::gelu, MlpActivation::relu2, MlpActivation::swiglu}) {
            const std::int64_t columns = is_gated(activation) ? shape.outputs / 2 : shape.outputs;
            linear_activated(execution, view, x, hidden.view(), activation, activated.view().columns_from(0, columns),
                             workspace.array());
            mlp_activation(execution, activation, joined.view(), separate.view().columns_from(0, columns));
            // The kernel for few rows applies the activation to rows as they are stored; the kernel of its own gets
            // these.
            const std::vector<float> all = activated.values(), want = separate.values();
            bool equal = true;
            for (std::int64_t n = 0; n < rows; ++n)
              for (std::int64_t o = 0; o < columns; ++o)
                equal = equal && all[n * shape.outputs + o] == want[n * shape.outputs + o];
            CHECK(equal);
          }
        }
      }
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
              y(shape.rows, shape.outputs, type), hidden(shape.rows, shape.outputs, type);
          const device::Buffer<std::byte> workspace = workspace_of(shape, type);
          // Of aligned bf16 rows the dense library of a GPU forms it, if it gets the bias in bf16.
          if (execution.backend == Backend::cuda)
            CHECK(gemm_with_epilogue(execution, x.view(), Form::plain, weights.stored.view(),
                                     transposed ? Form::plain : Form::transposed, y.view(),
                                     {.kind = Epilogue::Kind::bias_gelu, .bias = weights.rounded.data()},
                                     workspace.array()) == (type == Scalar::bf16 && is_aligned(shape)));
          linear_activated(execution, weights.view(true), x.view(), hidden.view(), MlpActivation::gelu, y.view(),
                           workspace.array());
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
          // Of aligned bf16 rows the dense library of a GPU forms it.
          if (execution.backend == Backend::cuda)
            CHECK(gemm_with_epilogue(execution, dy.view(), Form::plain, weights.stored.view(),
                                     transposed ? Form::transposed : Form::plain, fused.view(),
                                     {.kind = Epilogue::Kind::gelu_gradient, .hidden = hidden.view()},
                                     workspace.array()) == (type == Scalar::bf16 && is_aligned(shape)));
          linear_gelu_backward(execution, weights.view(false), dy.view(), hidden.view(), fused.view(),
                               workspace.array());
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
          CHECK(relative_error(fused.values(), want) <= tolerance(type));
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

TEST_CASE("products with packed weights are those with the unpacked weights") {
  for_each_backend([&](const Execution& execution) {
    for (const Packing packing : {Packing::int8, Packing::nf4})
      for (const bool transposed : {false, true})
        for (const auto& [outputs, inputs] :
             {std::pair<std::int64_t, std::int64_t>{64, 72}, {128, 2056}, {192, 264}, {60, 33}}) {
          const std::int64_t stored_rows = transposed ? inputs : outputs, columns = transposed ? outputs : inputs;
          const DeviceArray<std::uint8_t> codes(stored_rows * packed_bytes(packing, columns)),
              scales(stored_rows * packed_blocks(columns));
          const DeviceArray<float> row_scales(stored_rows * kRowScales),
              values(random_floats(stored_rows * columns, 4, 0.1f));
          const ParameterRows packed{.storage = StorageType::bf16,
                                     .rows = stored_rows,
                                     .columns = columns,
                                     .segment = columns,
                                     .weight = codes.data(),
                                     .packing = packing,
                                     .block_scales = scales.data(),
                                     .row_scales = row_scales.data()};
          pack_weights(execution, packed, 0, values.matrix(stored_rows, columns));
          const DeviceArray<float> unpacked(stored_rows * columns), bias(random_floats(outputs, 5));
          unpack_weights(execution, packed, 0, {unpacked.data(), Scalar::fp32, stored_rows, columns, columns});
          const std::vector<float> weight = unpacked.values(), added = bias.values();
          const DeviceArray<bf16> memory(stored_rows * columns);
          const LinearWeights weights{.matrix = {memory.data(), Scalar::bf16, stored_rows, columns, columns},
                                      .packed = &packed,
                                      .transposed = transposed,
                                      .bias = bias.array()};
          std::vector<float> first_row;
          for (const std::int64_t rows : {1, 2, 3, 8, 21, 64, 70}) {
            CAPTURE(rows);
            CAPTURE(outputs);
            const device::Buffer<std::byte> workspace = workspace_of({rows, outputs, inputs}, Scalar::bf16);
            const Rows x(random_floats(rows * inputs, 6), rows, inputs, Scalar::bf16),
                y(std::vector<float>(static_cast<std::size_t>(rows * outputs)), rows, outputs, Scalar::bf16),
                dx(std::vector<float>(static_cast<std::size_t>(rows * inputs)), rows, inputs, Scalar::bf16);
            linear(execution, weights, x.view(), y.view(), workspace.array());
            linear_backward(execution, weights, y.view(), dx.view(), workspace.array());
            const std::vector<float> of_x = x.values(), of_y = y.values(), of_dx = dx.values();
            const auto at = [&](std::int64_t out, std::int64_t in) {
              return static_cast<double>(weight[transposed ? in * outputs + out : out * inputs + in]);
            };
            for (std::int64_t row = 0; row < rows; row += 5) {
              for (std::int64_t out = 0; out < outputs; ++out) {
                double sum = added[out], magnitude = std::abs(sum);
                for (std::int64_t in = 0; in < inputs; ++in) {
                  const double product = of_x[row * inputs + in] * at(out, in);
                  sum += product;
                  magnitude += std::abs(product);
                }
                REQUIRE(std::abs(of_y[row * outputs + out] - sum) <=
                        static_cast<double>(inputs) * kRoundoff * magnitude +
                            1.01 * kRoundoffBf16 * (std::abs(sum) + std::abs(sum - added[out])));
              }
              for (std::int64_t in = 0; in < inputs; in += 7) {
                double sum = 0, magnitude = 0;
                for (std::int64_t out = 0; out < outputs; ++out) {
                  const double product = of_y[row * outputs + out] * at(out, in);
                  sum += product;
                  magnitude += std::abs(product);
                }
                REQUIRE(std::abs(of_dx[row * inputs + in] - sum) <=
                        static_cast<double>(outputs) * kRoundoff * magnitude + 1.01 * kRoundoffBf16 * std::abs(sum));
              }
            }
            if (!reads_codes(execution, weights, x.view(), y.view())) continue;
            // The same bits for any number of rows.
            const std::vector<float> first(of_y.begin(), of_y.begin() + outputs);
            if (first_row.empty()) first_row = first;
            CHECK(first == first_row);
          }
        }
  });
}

}  // namespace weft::testing
