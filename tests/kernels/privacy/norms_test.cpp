// SPDX-License-Identifier: Apache-2.0
#include "kernels/privacy/norms.hpp"

#include "kernels/privacy/clipped_sums.hpp"
#include "kernels/privacy/example_sums.hpp"
#include "tests/kernels/privacy/example_gradients.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr double kStart = 0.5;  ///< what norms contain before a call

std::vector<double> product_norms(const Execution& execution, AnyMatrix x, AnyMatrix g, const TestExamples& examples,
                                  const NormMethod& method) {
  const DeviceArray<double> norms(std::vector<double>(static_cast<std::size_t>(examples.count()), kStart));
  const DeviceArray<std::byte> workspace(
      product_norms_workspace(x.type, g.type, x.columns, g.columns, examples.sizes(), method));
  add_product_norms(execution, x, g, examples.view(), method, norms.array(), workspace.array());
  return norms.values();
}

constexpr NormAlgorithm kAlgorithms[] = {NormAlgorithm::direct, NormAlgorithm::gram};

struct Case {
  std::int64_t in, out;
  std::vector<std::int64_t> lengths;
};

/// One row, few rows, rows off the tile, an empty example between others, one example, widths far apart, no example.
const std::vector<Case> kCases = {
    {1, 1, {1}},     {7, 5, {1, 1, 1, 1}}, {64, 48, {9, 9, 9}}, {33, 70, {17, 0, 3, 17, 40}}, {130, 3, {65, 65}},
    {3, 130, {100}}, {5, 5, {}},           {24, 40, {0, 0}},    {72, 65, {8, 9, 300}}};

}  // namespace

TEST_CASE("norms of products agree with explicit gradients in float64: both algorithms, any tile") {
  for_each_backend([&](const Execution& execution) {
    for (const Case& c : kCases)
      for (const Scalar type : kRowTypes)
        for (const NormAlgorithm algorithm : kAlgorithms)
          for (const std::int64_t tile : {0, 5, 64}) {
            CAPTURE(c.in);
            CAPTURE(c.out);
            CAPTURE(static_cast<int>(type));
            CAPTURE(static_cast<int>(algorithm));
            CAPTURE(tile);
            const TestExamples examples(c.lengths, 2);
            const std::int64_t rows = examples.rows(), stride = c.out + 3;
            const TestMatrix x(random_floats(rows * c.in, 1), rows, c.in, type),
                g(random_floats(rows * stride, 2, 1e-3f), rows, stride, type);
            const std::vector<double> got =
                product_norms(execution, x.view(), g.view().columns_from(0, c.out), examples, {algorithm, tile});
            const std::vector<double> expected =
                squared_norms(product_gradients(x.values(), c.in, g.values(), c.out, stride, examples));
            const double added = algorithm == NormAlgorithm::direct
                                     ? 0
                                     : gram_error(c.in, c.out) * gram_cancellation(x.values(), c.in, g.values(), c.out,
                                                                                   stride, examples, expected);
            // Norms are added to kStart: its rounding in float64 is below the tolerance of a norm of 1e-6.
            CHECK(largest_relative_error(got, expected, kStart) <= norm_tolerance(type) + added);
          }
  });
}

TEST_CASE("norms of products by every implementation, at widths that all of them take") {
  for_each_backend([&](const Execution& execution) {
    for (const Case& c : {Case{64, 48, {9, 0, 9, 3}}, Case{136, 264, {300, 129, 129}}, Case{392, 133, {70, 129, 64}}})
      for (const Scalar type : {Scalar::bf16, Scalar::fp16}) {
        const TestExamples examples(c.lengths, 2);
        const std::int64_t rows = examples.rows(), stride = (c.out + 15) / 8 * 8;
        const TestMatrix x(random_floats(rows * c.in, 1), rows, c.in, type),
            g(random_floats(rows * stride, 2), rows, stride, type);
        const std::vector<float> gradient = g.values();
        const std::vector<double> expected =
            squared_norms(product_gradients(x.values(), c.in, gradient, c.out, stride, examples));
        const double added =
            gram_error(c.in, c.out) * gram_cancellation(x.values(), c.in, gradient, c.out, stride, examples, expected);
        for (const NormAlgorithm algorithm : kAlgorithms)
          for (const ProductImplementation implementation :
               {ProductImplementation::library, ProductImplementation::fused}) {
            const NormMethod method{algorithm, 0, implementation};
            const AnyMatrix part = g.view().columns_from(0, c.out);
            const std::vector<double> got = product_norms(execution, x.view(), part, examples, method);
            CHECK(largest_relative_error(got, expected, kStart) <=
                  norm_tolerance(type) + (algorithm == NormAlgorithm::gram ? added : 0));
            CHECK(got == product_norms(execution, x.view(), part, examples, method));
          }
      }
  });
}

TEST_CASE("norms of rows of two types: gradients of logits in fp32, hidden states in bf16") {
  for_each_backend([&](const Execution& execution) {
    const TestExamples examples({20, 20, 12});
    const std::int64_t rows = examples.rows(), in = 40, out = 90;
    const TestMatrix x(random_floats(rows * in, 1), rows, in, Scalar::bf16),
        g(random_floats(rows * out, 2), rows, out, Scalar::fp32);
    const std::vector<double> expected =
        squared_norms(product_gradients(x.values(), in, g.values(), out, out, examples));
    const double added =
        gram_error(in, out) * gram_cancellation(x.values(), in, g.values(), out, out, examples, expected);
    for (const NormAlgorithm algorithm : kAlgorithms) {
      const std::vector<double> got = product_norms(execution, x.view(), g.view(), examples, {algorithm, 0});
      CHECK(largest_relative_error(got, expected, kStart) <=
            norm_tolerance(Scalar::fp32) + (algorithm == NormAlgorithm::gram ? added : 0));
    }
  });
}

TEST_CASE("the tile changes norms by 1e-6 at most, and equal calls give equal bits") {
  for_each_backend([&](const Execution& execution) {
    const TestExamples examples({150, 150, 70});
    const std::int64_t rows = examples.rows(), in = 96, out = 80;
    const TestMatrix x(random_floats(rows * in, 3), rows, in, Scalar::bf16),
        g(random_floats(rows * out, 4), rows, out, Scalar::bf16);
    for (const NormAlgorithm algorithm : kAlgorithms) {
      const std::vector<double> whole = product_norms(execution, x.view(), g.view(), examples, {algorithm, 1000});
      for (const std::int64_t tile : {0, 7, 32, 64, 128}) {
        const std::vector<double> got = product_norms(execution, x.view(), g.view(), examples, {algorithm, tile});
        CHECK(largest_relative_error(got, whole) <= 1e-6);
        CHECK(got == product_norms(execution, x.view(), g.view(), examples, {algorithm, tile}));
      }
    }
  });
}

TEST_CASE("norms of inputs that share a large component: the direct sum is exact to 1e-5, the Gram sum a bound") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t length = 256, in = 64, out = 64;
    const TestExamples examples({length, length});
    const std::int64_t rows = examples.rows();
    for (const float mean : {0.0f, 3.0f, 10.0f, 30.0f}) {
      CAPTURE(mean);
      std::vector<float> inputs = random_floats(rows * in, 5, 1.7320508f), gradients = random_floats(rows * out, 6);
      for (float& value : inputs) value += mean;
      // Gradients of an example sum to about 0: multiples of 1/64, the second half the negative of the first, permuted.
      for (std::int64_t e = 0; e < 2; ++e)
        for (std::int64_t t = 0; t < length; ++t)
          for (std::int64_t j = 0; j < out; ++j) {
            float& value = gradients[(e * length + t) * out + j];
            value = t < length / 2 ? std::round(64 * value) / 64
                                   : -gradients[(e * length + (t * 5 + 3) % (length / 2)) * out + j];
          }
      for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
        const TestMatrix x(inputs, rows, in, type), g(gradients, rows, out, type);
        const std::vector<double> expected =
            squared_norms(product_gradients(x.values(), in, g.values(), out, out, examples));
        const auto error = [&](NormAlgorithm algorithm) {
          return largest_relative_error(product_norms(execution, x.view(), g.view(), examples, {algorithm, 0}),
                                        expected, kStart);
        };
        CHECK(error(NormAlgorithm::direct) <= 1e-5);
        // The Gram norm is larger by the bound of its error: gram_error of the sum of its terms without their signs. At
        // a mean of 30 that is 0.4 of the squared norm. Entries rounded to bf16 would err by as much without being a
        // bound.
        const std::vector<double> got =
            product_norms(execution, x.view(), g.view(), examples, {NormAlgorithm::gram, 0});
        const double added =
            gram_error(in, out) * gram_cancellation(x.values(), in, g.values(), out, out, examples, expected);
        CHECK(largest_relative_error(got, expected, kStart) <= 1e-5 + 1.01 * added);
        for (std::size_t e = 0; e < 2; ++e) CHECK(got[e] - kStart >= expected[e]);
      }
    }
  });
}

TEST_CASE("an example that is not finite, and one 10,000 times larger, leave the norms of the others unchanged") {
  for_each_backend([&](const Execution& execution) {
    const TestExamples examples({20, 20, 1, 20, 6});
    const std::int64_t rows = examples.rows(), in = 30, out = 24;
    const std::vector<float> inputs = random_floats(rows * in, 7), gradients = random_floats(rows * out, 8);
    for (const Scalar type : kRowTypes)
      for (const NormAlgorithm algorithm : kAlgorithms) {
        const auto norms = [&](const std::vector<float>& a, const std::vector<float>& b) {
          const TestMatrix x(a, rows, in, type), g(b, rows, out, type);
          return product_norms(execution, x.view(), g.view(), examples, {algorithm, 0});
        };
        const std::vector<double> plain = norms(inputs, gradients);
        for (const std::int64_t bad : {0, 1, 2, 4})
          for (const int kind : {0, 1, 2, 3}) {
            std::vector<float> a = inputs, b = gradients;
            const std::int64_t row = examples.end(bad) - 1;
            if (kind == 0) a[row * in + 3] = std::nanf("");
            if (kind == 1) b[row * out + 5] = std::numeric_limits<float>::infinity();
            if (kind == 2) b[row * out + 5] = -std::nanf("");
            if (kind == 3)
              for (std::int64_t i = examples.begin(bad) * out; i < examples.end(bad) * out; ++i) b[i] *= 1e4f;
            const std::vector<double> got = norms(a, b);
            for (std::int64_t e = 0; e < examples.count(); ++e) {
              if (e != bad)
                REQUIRE(got[e] == plain[e]);
              else if (kind == 3)
                REQUIRE(got[e] > 1e7 * plain[e]);
              else
                REQUIRE(!std::isfinite(got[e]));
              if (e == bad && kind < 3) REQUIRE(clip_factor(got[e], 1, ClipFunction::abadi) == 0);
            }
          }
      }
  });
}

TEST_CASE("norms of biases and gains agree with explicit gradients, with statistics of the rows and without") {
  for_each_backend([&](const Execution& execution) {
    for (const Case& c : kCases)
      for (const std::int64_t columns : {c.in, std::int64_t{300}})
        for (const Scalar type : kRowTypes)
          for (const bool statistics : {false, true}) {
            const TestExamples examples(c.lengths, 1);
            const std::int64_t rows = examples.rows(), count = examples.count();
            const TestMatrix x(random_floats(rows * columns, 1), rows, columns, type),
                g(random_floats(rows * columns, 2), rows, columns, type);
            const std::vector<float> shift = random_floats(rows, 3), scale = random_floats(rows, 4);
            const DeviceArray<float> device_shift(shift), device_scale(scale), sums(count * columns),
                products(count * columns);
            form_column_sums(execution, g.view(), examples.view(), sums.matrix(count, columns));
            form_column_products(execution, x.view(), g.view(), statistics ? device_shift.array() : Array<float>{},
                                 statistics ? device_scale.array() : Array<float>{}, examples.view(),
                                 products.matrix(count, columns));
            const auto norms = [&](const DeviceArray<float>& values) {
              const DeviceArray<double> squares(count);
              const DeviceArray<std::byte> workspace(stored_norms_workspace(count, columns));
              add_stored_norms(execution, any_matrix(values.matrix(count, columns)), squares.array(),
                               workspace.array());
              return squares.values();
            };
            const std::vector<float> inputs = x.values(), gradients = g.values();
            const auto expected = [&](const std::vector<float>* a, bool with) {
              return squared_norms(
                  column_gradients(a, gradients, columns, with ? &shift : nullptr, with ? &scale : nullptr, examples));
            };
            CHECK(largest_relative_error(norms(sums), expected(nullptr, false)) <= norm_tolerance(Scalar::fp32));
            CHECK(largest_relative_error(norms(products), expected(&inputs, statistics)) <=
                  norm_tolerance(Scalar::fp32));
          }
  });
}

TEST_CASE("norms of lookups agree with explicit gradients: long runs, ids of other ranks, examples that share ids") {
  for_each_backend([&](const Execution& execution) {
    for (const std::int64_t table : {1, 6, 70000})
      for (const std::int64_t columns : {1, 40, 300})
        for (const Scalar type : kRowTypes) {
          CAPTURE(table);
          CAPTURE(columns);
          const TestExamples examples({30, 0, 300, 1, 30}, 4);
          const std::int64_t rows = examples.rows();
          std::vector<std::uint32_t> ids;
          for (std::int64_t i = 0; i < rows; ++i)
            ids.push_back(
                static_cast<std::uint32_t>(philox(1, Purpose::test, 2, i).word[0] % std::min<std::int64_t>(table, 9)));
          const DeviceArray<std::uint32_t> device_ids(ids);
          const TestMatrix g(random_floats(rows * columns, 8), rows, columns, type);
          for (const auto& [first, held] : {std::pair{std::int64_t{0}, table}, {table / 3, table / 2}}) {
            const DeviceArray<double> norms(examples.count());
            const DeviceArray<std::byte> workspace(lookup_norms_workspace(columns, examples.sizes()));
            add_lookup_norms(execution, device_ids.array(), g.view(), first, held, examples.view(), norms.array(),
                             workspace.array());
            const std::int64_t seen = std::min<std::int64_t>(held, 9);
            CHECK(largest_relative_error(norms.values(), squared_norms(lookup_gradients(ids, g.values(), columns, first,
                                                                                        seen, examples))) <=
                  norm_tolerance(Scalar::fp32));
          }
        }
  });
}

TEST_CASE("the norm of a tied matrix is that of the sum of its two gradients; parts of a table, of the rows") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : kRowTypes) {
      const TestExamples examples({20, 1, 0, 33}, 2);
      const std::int64_t rows = examples.rows(), columns = 36, vocabulary = 50;
      std::vector<std::uint32_t> ids;
      for (std::int64_t i = 0; i < rows; ++i)
        ids.push_back(static_cast<std::uint32_t>(philox(3, Purpose::test, 2, i).word[0] % 7 * 5));
      const DeviceArray<std::uint32_t> device_ids(ids);
      const TestMatrix h(random_floats(rows * columns, 1), rows, columns, type),
          p(random_floats(rows * vocabulary, 2), rows, vocabulary, type),
          e(random_floats(rows * columns, 3), rows, columns, type);
      for (const auto& [first, held] : {std::pair{0, 50}, {13, 29}}) {
        const AnyMatrix logits = p.view().columns_from(first, held);
        const DeviceArray<double> norms(examples.count());
        const ExampleSizes sizes = examples.sizes();
        const NormMethod method{};
        const DeviceArray<std::byte> workspace(
            std::max({lookup_norms_workspace(columns, sizes), tied_rows_workspace(type, type, columns, sizes),
                      tied_norms_workspace({sizes.examples, sizes.most_rows, rows}),
                      product_norms_workspace(type, type, columns, held, sizes, method)}));
        const DeviceArray<float> tied(rows * columns);
        // The rows of the product in two calls: those of the first example end in the second.
        const TestExamples before({12, 0, 0, 0}, 2), after({8, 1, 0, 33}, 14);
        for (const TestExamples* product : {&before, &after})
          add_tied_rows(execution, h.view(), logits, product->view(), device_ids.array(), first, examples.view(),
                        tied.matrix(rows, columns), workspace.array());
        add_lookup_norms(execution, device_ids.array(), e.view(), first, held, examples.view(), norms.array(),
                         workspace.array());
        add_product_norms(execution, h.view(), logits, examples.view(), method, norms.array(), workspace.array());
        add_tied_norms(execution, e.view(), tied.matrix(rows, columns), examples.view(), norms.array(),
                       workspace.array());

        std::vector<float> part;
        const std::vector<float> all = p.values();
        for (std::int64_t t = 0; t < rows; ++t)
          part.insert(part.end(), all.begin() + t * vocabulary + first, all.begin() + t * vocabulary + first + held);
        std::vector<Gradient> expected = product_gradients(h.values(), columns, part, held, held, examples);
        const std::vector<Gradient> other = lookup_gradients(ids, e.values(), columns, first, held, examples);
        for (std::size_t b = 0; b < expected.size(); ++b)
          for (std::size_t i = 0; i < expected[b].size(); ++i) expected[b][i] += other[b][i];
        CHECK(largest_relative_error(norms.values(), squared_norms(expected)) <= norm_tolerance(Scalar::fp32));
      }
    }
  });
}

TEST_CASE("operations and the crossover of the algorithms: the harmonic mean of the widths") {
  struct Row {
    std::int64_t in, out, rows;
  };
  for (const Row& row : {Row{768, 768, 768},
                         {768, 3072, 1229},
                         {768, 50257, 1513},
                         {2048, 8192, 3277},
                         {4096, 4096, 4096},
                         {4096, 14336, 6372},
                         {4096, 128256, 7938}}) {
    CHECK(std::round(crossover_rows(row.in, row.out)) == row.rows);
    CHECK(std::round(crossover_rows(row.out, row.in)) == row.rows);
    CHECK(choose_algorithm(row.in, row.out, row.rows - 130, 128, 1) == NormAlgorithm::gram);
    CHECK(choose_algorithm(row.in, row.out, row.rows, 128, 1) == NormAlgorithm::direct);
    CHECK(choose_algorithm(row.in, row.out, row.rows - 130, 128, 0.5) == NormAlgorithm::direct);
    // At the crossover without tiles both take the same number of operations.
    const std::int64_t rows = row.rows;
    CHECK(norm_cost(NormAlgorithm::gram, row.in, row.out, rows, 0) ==
          doctest::Approx(norm_cost(NormAlgorithm::direct, row.in, row.out, rows, 0)).epsilon(1e-3));
  }
  CHECK(norm_cost(NormAlgorithm::direct, 3, 5, 7, 0) == 2 * 7 * 3 * 5);
  CHECK(norm_cost(NormAlgorithm::gram, 3, 5, 7, 2) == 7 * 9 * 8);
  // The rule "T > (in + out) / 2" would take the Gram form here, at eight times the operations.
  CHECK(choose_algorithm(4096, 128256, 60000, 1024, 1) == NormAlgorithm::direct);
}

}  // namespace weft::testing
