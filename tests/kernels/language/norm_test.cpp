// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/norm/norm.hpp"

#include "kernels/language/norm/frozen_norm.hpp"
#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr double kEpsilon = 1e-5f;

/// One row in float64, by the formulas of norm.hpp.
struct Row64 {
  double mean = 0, inverse = 0;
  std::vector<double> y, dh;
};

Row64 row64(Norm kind, const std::vector<double>& h, const std::vector<double>& weight, const std::vector<double>& bias,
            const std::vector<double>& dy) {
  const double n = static_cast<double>(h.size());
  Row64 out;
  if (kind == Norm::layer)
    for (const double v : h) out.mean += v / n;
  double variance = 0;
  for (const double v : h) variance += (v - out.mean) * (v - out.mean) / n;
  out.inverse = 1 / std::sqrt(variance + kEpsilon);
  double mean_a = 0, mean_ax = 0;
  for (std::size_t j = 0; j < h.size(); ++j) {
    const double xhat = (h[j] - out.mean) * out.inverse, a = weight[j] * dy[j];
    out.y.push_back(weight[j] * xhat + (bias.empty() ? 0 : bias[j]));
    mean_a += kind == Norm::layer ? a / n : 0;
    mean_ax += a * xhat / n;
  }
  for (std::size_t j = 0; j < h.size(); ++j)
    out.dh.push_back(out.inverse * (weight[j] * dy[j] - mean_a - (h[j] - out.mean) * out.inverse * mean_ax));
  return out;
}

std::vector<double> row_of(const std::vector<float>& values, std::int64_t row, std::int64_t columns) {
  return {values.begin() + row * columns, values.begin() + (row + 1) * columns};
}

/// a + b, rounded as stored.
std::vector<float> sums(const std::vector<float>& a, const std::vector<float>& b, Scalar type) {
  std::vector<float> out;
  for (std::size_t i = 0; i < a.size(); ++i) out.push_back(stored_as(type, a[i] + b[i]));
  return out;
}

struct Weights {
  std::vector<float> weight, bias;
  DeviceArray<float> device_weight, device_bias;

  Weights(std::int64_t columns, bool with_bias) : weight(random_floats(columns, 31)) {
    if (with_bias) bias = random_floats(columns, 32);
    device_weight = DeviceArray<float>(weight);
    device_bias = DeviceArray<float>(bias);
  }
  NormWeights view(Norm kind) const {
    return {kind, device_weight.array(), bias.empty() ? Array<const float>{} : Array<const float>(device_bias.array()),
            static_cast<float>(kEpsilon)};
  }
};

/// Partial sums of norm_backward, NaN before.
struct Sums {
  struct Part {
    std::int64_t columns;
    DeviceArray<float> values;

    Part(std::int64_t rows, std::int64_t columns_)
        : columns(columns_), values(std::vector<float>(NormBlocks::of(rows).count(rows) * columns_, std::nanf(""))) {}
    Matrix<float> view() const { return values.matrix(values.size() / columns, columns); }
    std::vector<double> column_sums() const {
      std::vector<double> out(static_cast<std::size_t>(columns));
      const std::vector<float> all = values.values();
      for (std::size_t i = 0; i < all.size(); ++i) out[i % out.size()] += all[i];
      return out;
    }
  } weight, bias, input;

  Sums(std::int64_t rows, std::int64_t columns) : weight(rows, columns), bias(rows, columns), input(rows, columns) {}
  NormSums view() const { return {weight.view(), bias.view(), input.view()}; }
};

}  // namespace

TEST_CASE("a frozen norm agrees with float64, with and without addend") {
  for_each_backend([&](const Execution& execution) {
    for (const std::int64_t columns : {31, 257, 768})
      for (const Norm kind : {Norm::layer, Norm::rms})
        for (const bool added : {false, true}) {
          const std::int64_t positions = 3, group = 2, rows = positions * group;
          const Weights weights(columns, true);
          const std::vector<float> dy = random_floats(rows * columns, 3), addend = random_floats(rows * columns, 4),
                                   inverse{0.5f, 2.0f, 3.0f};
          const DeviceArray<float> gradient(dy), before(addend), factors(inverse), dh(rows * columns);
          frozen_norm_backward(execution, weights.view(kind), factors.array(), group, gradient.matrix(rows, columns),
                               added ? before.matrix(rows, columns) : Matrix<float>{}, dh.matrix(rows, columns));
          std::vector<double> want;
          for (std::int64_t i = 0; i < rows * columns; ++i) {
            const std::int64_t row = i / columns;
            double mean = 0;
            for (std::int64_t c = 0; kind == Norm::layer && c < columns; ++c)
              mean += static_cast<double>(weights.weight[c]) * dy[row * columns + c] / static_cast<double>(columns);
            want.push_back((added ? addend[i] : 0) +
                           inverse[row / group] * (static_cast<double>(weights.weight[i % columns]) * dy[i] - mean));
          }
          CHECK(relative_error(dh.values(), want) <= row_tolerance(Scalar::fp32));
        }
  });
}

TEST_CASE("norms agree with float64, forward and backward, with and without residual, for every storage type") {
  for_each_backend([&](const Execution& execution) {
    int margins = 0;
    for (const std::int64_t columns : {31, 64, 257, 512, 768, 1024, 1032, 2056, 2560, 8192, 8200})
      for (const Norm kind : {Norm::layer, Norm::rms})
        for (const Scalar type : kRowTypes)
          for (const bool residual : {false, true}) {
            CAPTURE(columns);
            CAPTURE(residual);
            const std::int64_t rows = columns > 1000 ? 3 : 37;
            const Margins margin = kMargins[margins++ % 3];
            const Weights weights(columns, residual);
            const Rows x(random_floats(rows * columns, 1), rows, columns, type, margin),
                addend(random_floats(rows * columns, 2), rows, columns, type, margin),
                dy(random_floats(rows * columns, 3), rows, columns, type, margin),
                dh(random_floats(rows * columns, 4), rows, columns, type, margin);
            const Rows sum(rows, columns, type, margin), y(rows, columns, type, margin);
            const DeviceArray<float> mean(rows), inverse(rows);
            const NormStatistics statistics{kind == Norm::layer ? mean.array() : Array<float>{}, inverse.array()};
            norm_forward(execution, weights.view(kind), x.view(), residual ? addend.view() : AnyMatrix{}, sum.view(),
                         y.view(), statistics);
            const std::vector<float> a = x.values(), b = addend.values(), gradient = dy.values(), before = dh.values();
            const std::vector<float> h = residual ? sum.values() : a;
            if (residual) CHECK(std::ranges::equal(h, sums(a, b, type)));
            std::vector<double> want_y, want_dh, want_sum, want_mean, want_inverse;
            for (std::int64_t n = 0; n < rows; ++n) {
              const Row64 row = row64(kind, row_of(h, n, columns), widened(weights.weight), widened(weights.bias),
                                      row_of(gradient, n, columns));
              want_y.insert(want_y.end(), row.y.begin(), row.y.end());
              want_dh.insert(want_dh.end(), row.dh.begin(), row.dh.end());
              want_mean.push_back(row.mean);
              want_inverse.push_back(row.inverse);
            }
            CHECK(relative_error(y.values(), want_y) <= row_tolerance(type));
            CHECK(relative_error(inverse.values(), want_inverse) <= 1e-6);
            if (kind == Norm::layer) CHECK(relative_error(mean.values(), want_mean) <= 1e-6);

            const AnyMatrix input = residual ? sum.view() : x.view();
            const Sums partial(rows, columns);
            norm_backward(execution, weights.view(kind), input, statistics, dy.view(), dh.view(), dh.view(),
                          partial.view());
            for (std::size_t i = 0; i < want_dh.size(); ++i) want_sum.push_back(before[i] + want_dh[i]);
            CHECK(relative_error(dh.values(), want_sum) <= row_tolerance(type));
            // The gradients of weight and bias, and of a bias before the norm: sums of the kernel's own dh.
            std::vector<double> want_weight(columns), want_bias(columns), want_input(columns);
            const std::vector<float> stored = dh.values();
            for (std::int64_t i = 0; i < rows * columns; ++i) {
              const std::int64_t n = i / columns, c = i % columns;
              want_weight[c] += gradient[i] * (h[i] - want_mean[n]) * want_inverse[n];
              want_bias[c] += gradient[i];
              want_input[c] += stored[i];
            }
            // fp32 sums of at most 37 rows, of terms with 4 roundings; statistics within 1e-6 as above.
            CHECK(relative_error(partial.weight.column_sums(), want_weight) <= 4e-6);
            CHECK(relative_error(partial.bias.column_sums(), want_bias) <= 4e-6);
            CHECK(relative_error(partial.input.column_sums(), want_input) <= 4e-6);
            // With an addend elsewhere, without sums: the same bits.
            const Rows addend_copy(before, rows, columns, type, margin), apart(rows, columns, type, margin);
            norm_backward(execution, weights.view(kind), input, statistics, dy.view(), addend_copy.view(), apart.view(),
                          {});
            CHECK(std::ranges::equal(apart.values(), stored));
            // In place of dy, without sums.
            norm_backward(execution, weights.view(kind), input, statistics, dy.view(), {}, dy.view(), {});
            CHECK(relative_error(dy.values(), want_dh) <= row_tolerance(type));
          }
  });
}

TEST_CASE("a row has the same bits among few rows and among many") {
  constexpr std::int64_t kRows = 1003, kFew = 7;
  for_each_backend([&](const Execution& execution) {
    for (const std::int64_t columns : {8, 256, 512, 768, 1024, 2056, 2560, 8192})
      for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
        CAPTURE(columns);
        const Weights weights(columns, true);
        const Rows x(random_floats(kRows * columns, 1), kRows, columns, type),
            addend(random_floats(kRows * columns, 2), kRows, columns, type), sum(kRows, columns, type),
            y(kRows, columns, type), few_sum(kFew, columns, type), few_y(kFew, columns, type);
        const DeviceArray<float> mean(kRows), inverse(kRows), few_mean(kFew), few_inverse(kFew);
        norm_forward(execution, weights.view(Norm::layer), x.view(), addend.view(), sum.view(), y.view(),
                     {mean.array(), inverse.array()});
        norm_forward(execution, weights.view(Norm::layer), x.view().rows_from(500, kFew),
                     addend.view().rows_from(500, kFew), few_sum.view(), few_y.view(),
                     {few_mean.array(), few_inverse.array()});
        const auto part = [&](const std::vector<float>& all, std::int64_t each) {
          return std::vector<float>(all.begin() + 500 * each, all.begin() + (500 + kFew) * each);
        };
        CHECK(few_sum.values() == part(sum.values(), columns));
        CHECK(few_y.values() == part(y.values(), columns));
        CHECK(few_mean.values() == part(mean.values(), 1));
        CHECK(few_inverse.values() == part(inverse.values(), 1));
      }
  });
}

TEST_CASE("blocks of rows follow each other, end with their length, and are few") {
  const auto check = [](std::int64_t rows, std::int64_t length, const NormBlocks& blocks) {
    CAPTURE(rows);
    CAPTURE(length);
    std::int64_t next = 0;
    for (std::int64_t b = 0; b < blocks.count(rows); ++b) {
      CHECK(blocks.begin(b) == next);
      next = blocks.end(b, rows);
      CHECK(next > blocks.begin(b));
      CHECK((length == 0 || blocks.begin(b) / length == (next - 1) / length));
    }
    CHECK(next == rows);
  };
  for (const std::int64_t rows : {0, 1, 7, 8, 9, 4096, 8192, 8193, 65536, 100000}) {
    check(rows, 0, NormBlocks::of(rows));
    CHECK(NormBlocks::of(rows).count(rows) <= NormBlocks::most(rows));
    CHECK(NormBlocks::most(rows) <= 640);
  }
  for (const std::int64_t length : {1, 3, 64, 1000, 1024})
    for (const std::int64_t lengths : {1, 3, 16, 1000}) {
      const NormBlocks blocks = NormBlocks::of(lengths * length, length);
      CHECK(blocks.count(lengths * length) == lengths * blocks.of_length());
      CHECK(blocks.count(lengths * length) <= std::max<std::int64_t>(lengths, 640));
      // Also of fewer rows.
      for (const std::int64_t rows : {lengths * length, (lengths + 1) / 2 * length, length, length - 1})
        check(rows, length, blocks);
    }
}

TEST_CASE("a norm recomputed from the stored sum has the same bits, in place or not, also with other types of y") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : kRowTypes)
      for (const Scalar type_of_y : kRowTypes) {
        const std::int64_t rows = 6, columns = 768;
        const Weights weights(columns, true);
        const Rows x(random_floats(rows * columns, 1), rows, columns, type),
            addend(random_floats(rows * columns, 2), rows, columns, type);
        const Rows sum(rows, columns, type), y(rows, columns, type_of_y), again(rows, columns, type_of_y);
        const DeviceArray<float> mean(rows), inverse(rows), other_mean(rows), other_inverse(rows);
        norm_forward(execution, weights.view(Norm::layer), x.view(), addend.view(), sum.view(), y.view(),
                     {mean.array(), inverse.array()});
        norm_forward(execution, weights.view(Norm::layer), sum.view(), {}, {}, again.view(),
                     {other_mean.array(), other_inverse.array()});
        CHECK(y.values() == again.values());
        CHECK(inverse.values() == other_inverse.values());
        norm_forward(execution, weights.view(Norm::layer), x.view(), addend.view(), addend.view(), again.view(),
                     {other_mean.array(), other_inverse.array()});
        CHECK(addend.values() == sum.values());
        CHECK(y.values() == again.values());
      }
  });
}

TEST_CASE("the norm of a row of one column has no gradient") {
  for_each_backend([&](const Execution& execution) {
    const Weights weights(1, true);
    for (const Norm kind : {Norm::layer, Norm::rms}) {
      const Rows x({3, -3}, 2, 1, Scalar::fp32), dy({1, 1}, 2, 1, Scalar::fp32), y(2, 1, Scalar::fp32),
          dx(2, 1, Scalar::fp32);
      const DeviceArray<float> mean(2), inverse(2);
      norm_forward(execution, weights.view(kind), x.view(), {}, {}, y.view(), {mean.array(), inverse.array()});
      norm_backward(execution, weights.view(kind), x.view(), {mean.array(), inverse.array()}, dy.view(), {}, dx.view(),
                    {});
      for (std::size_t n = 0; n < 2; ++n) {
        const Row64 want = row64(kind, {x.values()[n]}, widened(weights.weight), widened(weights.bias), {1});
        CHECK(y.values()[n] == doctest::Approx(want.y[0]).epsilon(1e-6));
        CHECK(std::abs(dx.values()[n] - want.dh[0]) <= 4 * kRoundoff * want.inverse);
      }
    }
  });
}

TEST_CASE("norms of rows of zeros and of rows far from zero") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t columns = 256;
    for (const Norm kind : {Norm::layer, Norm::rms}) {
      // Row 1 is 100 + noise: with the variance as a difference of squares 1e-4 of it would be lost.
      std::vector<float> values(static_cast<std::size_t>(2 * columns));
      const std::vector<float> noise = random_floats(columns, 5);
      for (std::int64_t j = 0; j < columns; ++j) values[columns + j] = 100.0f + noise[j];
      const Rows x(values, 2, columns, Scalar::fp32), dy(random_floats(2 * columns, 6), 2, columns, Scalar::fp32);
      const Rows y(2, columns, Scalar::fp32), dx(2, columns, Scalar::fp32);
      const Weights weights(columns, false);
      const DeviceArray<float> mean(2), inverse(2);
      norm_forward(execution, weights.view(kind), x.view(), {}, {}, y.view(), {mean.array(), inverse.array()});
      norm_backward(execution, weights.view(kind), x.view(), {mean.array(), inverse.array()}, dy.view(), {}, dx.view(),
                    {});
      const std::vector<float> got = y.values(), gradient = dx.values();
      for (std::int64_t j = 0; j < columns; ++j) {
        REQUIRE(got[j] == 0.0f);
        REQUIRE(std::isfinite(gradient[j]));
      }
      const Row64 want =
          row64(kind, row_of(values, 1, columns), widened(weights.weight), {}, row_of(dy.values(), 1, columns));
      // The mean, 100, is rounded to 2^-18; the deviations are 0.6.
      CHECK(relative_error(std::vector<float>(got.begin() + columns, got.end()), want.y) <= 3e-5);
    }
  });
}

}  // namespace weft::testing
