// SPDX-License-Identifier: Apache-2.0
#include "kernels/privacy/clipped_sums.hpp"
#include "kernels/privacy/example_sums.hpp"
#include "kernels/privacy/norms.hpp"
#include "tests/kernels/privacy/example_gradients.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr float kStart = 0.25f;  ///< what sums contain before a call

/// Factors of every size, one of them 0.
std::vector<float> some_factors(std::int64_t count) {
  std::vector<float> factors;
  for (std::int64_t e = 0; e < count; ++e) factors.push_back(e == 1 ? 0.0f : 1.0f / (1.5f + static_cast<float>(e)));
  return factors;
}

struct Sum {
  std::vector<double> value, size;  ///< the sum, and that of the absolute values of its terms
};

/// kStart + sum over b of c_b gradient_b. size: from absolute gradients.
Sum weighed(const std::vector<Gradient>& gradients, const std::vector<Gradient>& absolute,
            const std::vector<float>& factors, std::int64_t elements) {
  Sum sum{std::vector<double>(static_cast<std::size_t>(elements), kStart),
          std::vector<double>(static_cast<std::size_t>(elements), kStart)};
  for (std::size_t e = 0; e < gradients.size(); ++e)
    for (std::int64_t i = 0; i < elements && factors[e] != 0; ++i) {
      sum.value[i] += static_cast<double>(factors[e]) * gradients[e][i];
      sum.size[i] += static_cast<double>(factors[e]) * absolute[e][i];
    }
  return sum;
}

std::vector<float> absolute(std::vector<float> values) {
  for (float& value : values) value = std::abs(value);
  return values;
}

/// Largest error in units of the rounding of fp32 sums of `terms` terms.
double largest_error(const std::vector<float>& got, const Sum& expected, double terms) {
  double worst = got.size() == expected.value.size() ? 0 : std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < std::min(got.size(), expected.value.size()); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - expected.value[i]);
    if (!(error <= worst * terms * kRoundoff * expected.size[i]))
      worst = error / (terms * kRoundoff * expected.size[i]);
    if (std::isnan(worst)) return std::numeric_limits<double>::infinity();
  }
  return worst;
}

struct Case {
  std::int64_t in, out;
  std::vector<std::int64_t> lengths;
};
const std::vector<Case> kCases = {
    {1, 1, {1}},
    {7, 5, {1, 1, 1, 1}},
    {64, 48, {9, 9, 9}},
    {33, 70, {17, 0, 3, 17, 40}},
    {5, 5, {}},
    {24, 40, {0, 0}},
    {72, 65, {8, 9, 300}},
    {3, 4, {2500, 2600}},
    {392, 133, {70, 129, 0, 64}},
    {264, 136, {1300, 5, 0, 70, 700}}};  // enough rows that tiles are shared (hopper_products.hpp)

/// Rows of one example, NaN and infinite.
void spoil(std::vector<float>& values, std::int64_t columns, const TestExamples& examples, std::int64_t example) {
  for (std::int64_t i = examples.begin(example) * columns; i < examples.end(example) * columns; ++i)
    values[i] = i % 2 == 0 ? std::nanf("") : std::numeric_limits<float>::infinity();
}

}  // namespace

TEST_CASE("clipping factors: at most those of the exact norm, 0 of what is not finite") {
  using enum ClipFunction;
  CHECK(clip_factor(4, 1, abadi) == doctest::Approx(0.5).epsilon(1e-4));
  CHECK(clip_factor(4, 1, abadi) < 0.5f);
  CHECK(clip_factor(4, 3, abadi) == 1);
  CHECK(clip_factor(0, 1, abadi) == 1);
  CHECK(clip_factor(4, 1, automatic) == doctest::Approx(1 / 2.01).epsilon(1e-4));
  CHECK(clip_factor(0, 1, automatic) == doctest::Approx(100).epsilon(1e-4));
  CHECK(clip_factor(4, 1.99, indicator) == 0);
  CHECK(clip_factor(4, 2.01, indicator) == 1);
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::nan("");
  for (const ClipFunction function : {abadi, automatic, indicator})
    for (const double bad : {infinity, -infinity, nan, -nan, -1e-3}) CHECK(clip_factor(bad, 1, function) == 0);
  // Also with a norm that is too small by its tolerance, c * norm stays within the bound.
  for (int i = -60; i < 60; ++i) {
    const double squared = std::pow(1.7, i), norm = std::sqrt(squared);
    for (const ClipFunction function : {abadi, automatic, indicator})
      for (const double clip : {1e-3, 0.7, 5.0})
        CHECK(static_cast<double>(clip_factor(squared * (1 - 1e-4), clip, function)) * norm <= clip);
  }
  for_each_backend([&](const Execution& execution) {
    const DeviceArray<double> norms(std::vector<double>{4, nan, 0.25, infinity, 0});
    const DeviceArray<float> factors(5);
    const DeviceArray<double> unit(std::vector<double>{4}), balance(std::vector<double>{7});
    clip_factors(execution, norms.array(), 0.25, abadi, 700, factors.array(), unit.data());
    const std::vector<double> squared = norms.values();
    for (std::size_t b = 0; b < 5; ++b) CHECK(factors.values()[b] == clip_factor(squared[b], 1, abadi, 700));
    // Records whose norm is not finite are not within the bound.
    add_clip_balance(execution, factors.array(), balance.data());
    CHECK(balance.values()[0] == 7 + 2 - 3);
  });
}

TEST_CASE("an adaptive bound takes the step of Andrew et al., with noise on the count, and stays in its range") {
  for_each_backend([&](const Execution& execution) {
    const NoiseStream stream = noise_stream({1, 2, 3}, 5, 0, NoisePurpose::clip_bound);
    const double xi = noise_pair(chacha20(stream.key, stream.block(0)), 0).first;
    const auto after = [&](double clip, double balance, const ClipAdaptation& adaptation) {
      const DeviceArray<double> bound(std::vector<double>{clip}), count(std::vector<double>{balance});
      adapt_clip(execution, count.data(), adaptation, stream, bound.data());
      return bound.values()[0];
    };
    // 6 of 8 records within the bound, 10 expected: (6 - 4) / 10 + 1/2.
    CHECK(after(2, 4, {0.5, 0.2, 0, 10}) == doctest::Approx(2 * std::exp(-0.2 * 0.2)).epsilon(1e-14));
    CHECK(after(2, 4, {0.9, 0.2, 0, 10}) == doctest::Approx(2 * std::exp(0.2 * 0.2)).epsilon(1e-14));
    CHECK(after(2, 4, {0.5, 0.2, 3, 10}) == doctest::Approx(2 * std::exp(-0.2 * (2 + 3 * xi) / 10)).epsilon(1e-12));
    CHECK(after(1e-6, 10, {0.01, 5, 0, 10}) == kLeastClip);
    CHECK(after(1e6, -10, {0.99, 5, 0, 10}) == kLargestClip);
  });
}

TEST_CASE("equal rows, whose sums are off in one direction: the bound holds for fp32 sums of 32,768 terms") {
  // The worst case of sums that are formed term by term: all terms equal. fp32 rounds each addition of a binade the
  // same way; tensor cores truncate. A margin without the number of rows, 2^-14, does not cover it.
  const std::int64_t rows = 32768;
  double worst = 0;
  for (const float value : {1.0f, 0.7f, 1.1f, 0.3f}) {
    const float term = value * value;
    float rounded = 0, truncated = 0;
    for (std::int64_t t = 0; t < rows; ++t) {
      rounded += term;
      const double exact = static_cast<double>(truncated) + static_cast<double>(term);
      truncated = static_cast<float>(exact);
      if (static_cast<double>(truncated) > exact) truncated = std::nextafterf(truncated, 0);
    }
    const double true_norm = static_cast<double>(rows) * static_cast<double>(term);
    for (const double norm : {static_cast<double>(rounded), static_cast<double>(truncated)}) {
      worst = std::max(worst, 1 - norm / true_norm);
      CHECK(static_cast<double>(clip_factor(norm * norm, 1, ClipFunction::abadi, rows)) * true_norm <= 1);
      // As many columns of equal entries: a term on the diagonal of a Gram matrix, for any number of output gradients.
      CHECK(at_most(norm, gram_error(rows, 1)) >= true_norm * (1 - 1e-9));
    }
  }
  CHECK(worst > 0x1p-14);
  // And for what the kernels sum.
  for_each_backend([&](const Execution& execution) {
    const std::int64_t in = 8, out = 16;
    const TestExamples examples({rows});
    const ExampleSizes sizes = examples.sizes();
    for (const Scalar type : {Scalar::bf16, Scalar::fp32})
      for (const float value : {1.0f, 0.7f})
        for (const ProductImplementation implementation :
             {ProductImplementation::library, ProductImplementation::fused}) {
          const TestMatrix x(std::vector<float>(static_cast<std::size_t>(rows * in), value), rows, in, type),
              g(std::vector<float>(static_cast<std::size_t>(rows * out), value), rows, out, type);
          const NormMethod method{NormAlgorithm::direct, 0, implementation};
          const DeviceArray<double> norms(1);
          const DeviceArray<float> factors(1), sum(in * out);
          const DeviceArray<std::byte> workspace(
              std::max(product_norms_workspace(type, type, in, out, sizes, method),
                       clipped_product_workspace(type, type, in, out, sizes, implementation)));
          add_product_norms(execution, x.view(), g.view(), examples.view(), method, norms.array(), workspace.array());
          clip_factors(execution, norms.array(), 0.5, ClipFunction::abadi, rows, factors.array());
          add_clipped_product(execution, x.view(), g.view(), examples.view(), factors.array(), sum.matrix(out, in),
                              workspace.array(), implementation);
          double squared = 0;
          for (const float entry : sum.values()) squared += static_cast<double>(entry) * static_cast<double>(entry);
          CHECK(std::sqrt(squared) <= 0.5);
          CHECK(std::sqrt(squared) >= 0.5 * (1 - 3 * norm_margin(rows)));
          const double term = static_cast<double>(x.values()[0]) * static_cast<double>(g.values()[0]);
          const double true_norm = static_cast<double>(rows) * term * std::sqrt(static_cast<double>(in * out));
          CHECK(static_cast<double>(factors.values()[0]) * true_norm <= 0.5);
        }
  });
}

TEST_CASE("clipped sums of products agree with explicit gradients and add to what is there") {
  for_each_backend([&](const Execution& execution) {
    for (const Case& c : kCases)
      for (const Scalar type : kRowTypes) {
        CAPTURE(c.in);
        CAPTURE(c.out);
        CAPTURE(static_cast<int>(type));
        const TestExamples examples(c.lengths, 2);
        const std::int64_t rows = examples.rows(), stride = c.in % 8 == 0 ? (c.out + 15) / 8 * 8 : c.out + 3;
        std::vector<float> inputs = random_floats(rows * c.in, 1), gradients = random_floats(rows * stride, 2);
        if (examples.count() > 1) {  // factor 0
          spoil(inputs, c.in, examples, 1);
          spoil(gradients, stride, examples, 1);
        }
        const TestMatrix x(inputs, rows, c.in, type), g(gradients, rows, stride, type);
        const std::vector<float> factors = some_factors(examples.count());
        const DeviceArray<float> device_factors(factors);
        const std::vector<float> a = x.values(), b = g.values();
        const Sum expected =
            weighed(product_gradients(a, c.in, b, c.out, stride, examples),
                    product_gradients(absolute(a), c.in, absolute(b), c.out, stride, examples), factors, c.in * c.out);
        for (const ProductImplementation implementation :
             {ProductImplementation::library, ProductImplementation::fused}) {
          const DeviceArray<float> out(std::vector<float>(static_cast<std::size_t>(c.in * c.out), kStart));
          const DeviceArray<std::byte> workspace(
              clipped_product_workspace(type, type, c.in, c.out, examples.sizes(), implementation));
          add_clipped_product(execution, x.view(), g.view().columns_from(0, c.out), examples.view(),
                              device_factors.array(), out.matrix(c.out, c.in), workspace.array(), implementation);
          // All rows in one fp32 sum: far from the bound of one rounding per row.
          CHECK(largest_error(out.values(), expected, static_cast<double>(rows)) <= 1);
        }
      }
  });
}

TEST_CASE("clipped sums of biases, gains and lookups agree with explicit gradients") {
  for_each_backend([&](const Execution& execution) {
    for (const Case& c : kCases)
      for (const Scalar type : kRowTypes)
        for (const bool statistics : {false, true}) {
          const TestExamples examples(c.lengths, 2);
          const std::int64_t rows = examples.rows(), columns = c.in, count = examples.count();
          std::vector<float> inputs = random_floats(rows * columns, 1), gradients = random_floats(rows * columns, 2),
                             shift = random_floats(rows, 3), scale = random_floats(rows, 4);
          if (count > 1) {
            spoil(inputs, columns, examples, 1);
            spoil(gradients, columns, examples, 1);
            spoil(shift, 1, examples, 1);
          }
          const TestMatrix x(inputs, rows, columns, type), g(gradients, rows, columns, type);
          const DeviceArray<float> device_shift(shift), device_scale(scale);
          const std::vector<float> factors = some_factors(count);
          const DeviceArray<float> device_factors(factors);
          const std::vector<float> start(static_cast<std::size_t>(columns), kStart);
          const DeviceArray<float> sums(start), products(start), kept(count * columns);
          const AnyMatrix of_examples = any_matrix(kept.matrix(count, columns));
          form_column_sums(execution, g.view(), examples.view(), kept.matrix(count, columns));
          add_clipped_examples(execution, of_examples, device_factors.array(), sums.array());
          form_column_products(execution, x.view(), g.view(), statistics ? device_shift.array() : Array<float>{},
                               statistics ? device_scale.array() : Array<float>{}, examples.view(),
                               kept.matrix(count, columns));
          add_clipped_examples(execution, of_examples, device_factors.array(), products.array());
          const std::vector<float> a = x.values(), b = g.values(), abs_a = absolute(a), abs_b = absolute(b);
          const double terms = 200;  // 128 rows of a block, the blocks, three factors, the sum over examples
          CHECK(largest_error(
                    sums.values(),
                    weighed(column_gradients(nullptr, b, columns, nullptr, nullptr, examples),
                            column_gradients(nullptr, abs_b, columns, nullptr, nullptr, examples), factors, columns),
                    terms) <= 1);
          // |x - shift| |scale g| <= (|x| + |shift|) |scale| |g|.
          std::vector<float> minus = absolute(shift);
          for (float& value : minus) value = -value;
          const std::vector<float> abs_scale = absolute(scale);
          CHECK(largest_error(products.values(),
                              weighed(column_gradients(&a, b, columns, statistics ? &shift : nullptr,
                                                       statistics ? &scale : nullptr, examples),
                                      column_gradients(&abs_a, abs_b, columns, statistics ? &minus : nullptr,
                                                       statistics ? &abs_scale : nullptr, examples),
                                      factors, columns),
                              terms) <= 1);

          const std::int64_t table = 9, first = 2, held = 5;
          std::vector<std::uint32_t> ids;
          for (std::int64_t i = 0; i < rows; ++i)
            ids.push_back(philox(5, Purpose::test, 2, i).word[0] % static_cast<std::uint32_t>(table));
          const DeviceArray<std::uint32_t> device_ids(ids);
          const DeviceArray<float> out(std::vector<float>(static_cast<std::size_t>(held * columns), kStart));
          const DeviceArray<std::byte> memory(clipped_lookup_workspace(columns, examples.sizes()));
          add_clipped_lookup(execution, device_ids.array(), g.view(), first, examples.view(), device_factors.array(),
                             out.matrix(held, columns), memory.array());
          CHECK(largest_error(
                    out.values(),
                    weighed(lookup_gradients(ids, b, columns, first, held, examples),
                            lookup_gradients(ids, abs_b, columns, first, held, examples), factors, held * columns),
                    static_cast<double>(examples.sizes().rows) + 2) <= 1);
        }
  });
}

TEST_CASE("stored gradients: rounded to bf16, their norms those of the rounded values, sums from them alone") {
  for_each_backend([&](const Execution& execution) {
    for (const Case& c : kCases)
      for (const Scalar type : kRowTypes)
        for (const bool tied : {false, true}) {
          const TestExamples examples(c.lengths, 2);
          const std::int64_t rows = examples.rows(), count = examples.count(), size = c.in * c.out;
          const TestMatrix x(random_floats(rows * c.in, 1), rows, c.in, type),
              g(random_floats(rows * c.out, 2), rows, c.out, type), e(random_floats(rows * c.in, 3), rows, c.in, type);
          std::vector<std::uint32_t> ids;
          for (std::int64_t i = 0; i < rows; ++i)
            ids.push_back(philox(5, Purpose::test, 2, i).word[0] % static_cast<std::uint32_t>(c.out + 2));
          const DeviceArray<std::uint32_t> device_ids(ids);
          const DeviceArray<std::uint16_t> memory(std::vector<std::uint16_t>(count * size, 0x7fc0));  // NaN
          const Matrix<bf16> stored{reinterpret_cast<bf16*>(memory.data()), count, size, size};
          const DeviceArray<double> norms(count);
          const DeviceArray<std::byte> workspace(
              std::max({form_examples_workspace(type, type, c.in, c.out, examples.sizes()),
                        lookup_to_examples_workspace(examples.sizes()), stored_norms_workspace(count, size)}));
          form_examples(execution, x.view(), g.view(), examples.view(), stored, tied ? Array<double>{} : norms.array(),
                        workspace.array());
          if (tied) {
            add_lookup_to_examples(execution, device_ids.array(), e.view(), 1, examples.view(), stored,
                                   workspace.array());
            add_stored_norms(execution, any_matrix(stored), norms.array(), workspace.array());
          }
          const std::vector<std::uint16_t> bits = memory.values();
          const std::vector<float> a = x.values(), b = g.values(), added = e.values();
          std::vector<Gradient> exact = product_gradients(a, c.in, b, c.out, c.out, examples),
                                bound = product_gradients(absolute(a), c.in, absolute(b), c.out, c.out, examples);
          const std::vector<Gradient> lookup = lookup_gradients(ids, added, c.in, 1, c.out, examples),
                                      lookup_bound = lookup_gradients(ids, absolute(added), c.in, 1, c.out, examples);
          std::vector<Gradient> as_stored(static_cast<std::size_t>(count));
          double worst = 0;
          for (std::int64_t i = 0; i < count; ++i)
            for (std::int64_t j = 0; j < size; ++j) {
              const double value = float{bf16{bits[i * size + j]}};
              const double want = exact[i][j] + (tied ? lookup[i][j] : 0),
                           most = bound[i][j] + (tied ? lookup_bound[i][j] : 0);
              // Stored in bf16 once, a tied matrix twice: each time rounded by at most half a unit.
              const double allowed = kRoundoffBf16 * (std::abs(want) + (tied ? std::abs(exact[i][j]) : 0)) * 1.01 +
                                     static_cast<double>(rows) * kRoundoff * most;
              if (std::abs(value - want) > 0) worst = std::max(worst, std::abs(value - want) / allowed);
              as_stored[i].push_back(value);
            }
          CHECK(worst <= 1);
          // Sums of squares in float64.
          CHECK(largest_relative_error(norms.values(), squared_norms(as_stored)) <= 1e-12);

          std::vector<float> factors = some_factors(count);
          std::vector<Gradient> absolute_stored = as_stored;
          for (Gradient& gradient : absolute_stored)
            for (double& value : gradient) value = std::abs(value);
          const DeviceArray<float> device_factors(factors);
          const DeviceArray<float> out(std::vector<float>(static_cast<std::size_t>(size), kStart));
          add_clipped_examples(execution, any_matrix(stored), device_factors.array(), out.array());
          CHECK(largest_error(out.values(), weighed(as_stored, absolute_stored, factors, size),
                              2 * static_cast<double>(count) + 2) <= 1);
        }
  });
}

TEST_CASE("values of examples: norms and clipped sums, in fp32 and bf16, of every width and with gaps between rows") {
  for_each_backend([&](const Execution& execution) {
    // One value, a width without and with vectors, one part, two of which the last is short, and more parts of an
    // example than a block of threads; rows of vectors with a gap, and rows that are not aligned.
    const std::vector<std::pair<std::int64_t, std::int64_t>> widths = {
        {1, 1}, {7, 7}, {8, 16}, {40, 43}, {4096, 4096}, {4104, 4112}, {4097, 4097}, {1100008, 1100008}};
    for (const auto& [columns, stride] : widths)
      for (const std::int64_t count : {0, 1, 9})
        for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
          if (columns > 5000 && count > 1) continue;
          CAPTURE(columns);
          CAPTURE(count);
          std::vector<float> given = random_floats(count * stride, 1);
          if (count > 1) std::fill_n(given.begin() + stride, columns, std::nanf(""));  // factor 0
          const TestMatrix stored(given, count, stride, type);
          const std::vector<float> values = stored.values(), factors = some_factors(count);
          std::vector<Gradient> rows(static_cast<std::size_t>(count)), absolute_rows = rows;
          for (std::int64_t b = 0; b < count; ++b)
            for (std::int64_t i = 0; i < columns; ++i) {
              rows[b].push_back(static_cast<double>(values[b * stride + i]));
              absolute_rows[b].push_back(std::abs(rows[b].back()));
            }
          const DeviceArray<double> norms(count);
          const DeviceArray<float> device_factors(factors), out(std::vector<float>(columns, kStart));
          const DeviceArray<std::byte> workspace(stored_norms_workspace(count, columns));
          const AnyMatrix view = stored.view().columns_from(0, columns);
          add_stored_norms(execution, view, norms.array(), workspace.array());
          add_clipped_examples(execution, view, device_factors.array(), out.array());
          const std::vector<double> got = norms.values(), expected = squared_norms(rows);
          for (std::size_t b = 0; b < got.size(); ++b) {
            if (b == 1)
              CHECK(std::isnan(got[b]));
            else  // sums of squares in float64, of at most 1.1 million terms
              CHECK(got[b] == doctest::Approx(expected[b]).epsilon(1e-12));
          }
          CHECK(largest_error(out.values(), weighed(rows, absolute_rows, factors, columns),
                              2 * static_cast<double>(count) + 2) <= 1);
        }
  });
}

TEST_CASE("what is summed of an example has a norm of at most the bound: products, also where Gram sums cancel") {
  for_each_backend([&](const Execution& execution) {
    const double clip = 0.5;
    const TestExamples examples({60, 2, 60});
    const std::int64_t rows = examples.rows(), in = 40, out = 33, size = in * out;
    const ExampleSizes sizes = examples.sizes();
    // The gradients of each example sum to 0: the second half is the negative of the first, in another order.
    std::vector<float> gradients = random_floats(rows * out, 2);
    for (const auto& [begin, count] : {std::pair<std::int64_t, std::int64_t>{0, 60}, {60, 2}, {62, 60}})
      for (std::int64_t t = 0; t < count / 2; ++t)
        for (std::int64_t j = 0; j < out; ++j) {
          float& value = gradients[(begin + t) * out + j];
          value = std::round(64 * value) / 64;
          gradients[(begin + count / 2 + (t * 7 + 3) % (count / 2)) * out + j] = -value;
        }
    enum class Way { direct, gram, stored };
    for (const float mean : {0.0f, 30.0f, 300.0f})
      for (const Scalar type : kRowTypes)
        for (const Way way : {Way::direct, Way::gram, Way::stored}) {
          CAPTURE(mean);
          std::vector<float> inputs = random_floats(rows * in, 1);
          for (float& value : inputs) value += mean;
          const TestMatrix x(inputs, rows, in, type), g(gradients, rows, out, type);
          const NormMethod method{way == Way::gram ? NormAlgorithm::gram : NormAlgorithm::direct, 0};
          const DeviceArray<double> norms(3);
          const DeviceArray<float> factors(3);
          const DeviceArray<std::byte> workspace(std::max({product_norms_workspace(type, type, in, out, sizes, method),
                                                           clipped_product_workspace(type, type, in, out, sizes),
                                                           form_examples_workspace(type, type, in, out, sizes)}));
          const DeviceArray<std::uint16_t> memory(3 * size);
          const Matrix<bf16> stored{reinterpret_cast<bf16*>(memory.data()), 3, size, size};
          if (way == Way::stored)
            form_examples(execution, x.view(), g.view(), examples.view(), stored, norms.array(), workspace.array());
          else
            add_product_norms(execution, x.view(), g.view(), examples.view(), method, norms.array(), workspace.array());
          clip_factors(execution, norms.array(), clip, ClipFunction::abadi, 60, factors.array());
          const std::vector<float> all = factors.values();
          for (std::size_t b = 0; b < 3; ++b) {
            std::vector<float> one(3);
            one[b] = all[b];
            const DeviceArray<float> only(one);
            const DeviceArray<float> sum(size);
            if (way == Way::stored)
              add_clipped_examples(execution, any_matrix(stored), only.array(), sum.array());
            else
              add_clipped_product(execution, x.view(), g.view(), examples.view(), only.array(), sum.matrix(out, in),
                                  workspace.array());
            double squared = 0;
            for (const float value : sum.values()) squared += static_cast<double>(value) * static_cast<double>(value);
            CHECK(std::sqrt(squared) <= clip);
            // The bound of the error of a Gram sum makes the factor smaller where its terms cancel. Two rows of 16 bits
            // may have equal inputs: then the gradient is 0.
            if (squared > 0 && (mean == 0 || way != Way::gram))
              CHECK(std::sqrt(squared) >= clip * (1 - 3 * norm_margin(60)));
          }
        }
  });
}

}  // namespace weft::testing
