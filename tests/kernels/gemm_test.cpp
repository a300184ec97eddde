// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/gemm.hpp"

#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

struct Shape {
  std::int64_t rows, columns, inner;
};
// One of everything; uneven sizes; more rows than one thread's share; a single row; sizes of 16 that GPUs are fastest
// at.
constexpr Shape kShapes[] = {{1, 1, 1}, {7, 5, 770}, {130, 65, 33}, {1, 300, 129}, {192, 64, 256}};
struct Factors {
  float alpha, beta;
};
constexpr Factors kFactors[] = {{1.0f, 0.0f}, {1.0f, 1.0f}, {-0.5f, 2.0f}};
constexpr std::int64_t kGap = 3;  // elements between rows

/// An operand that enters the product as [rows, columns], stored with gaps of NaN between its rows.
struct Operand {
  Form form;
  std::int64_t rows, columns, stride;
  TestMatrix matrix;
  std::vector<float> stored;

  Operand(std::int64_t rows_, std::int64_t columns_, Form form_, Scalar type, std::uint64_t stream)
      : form(form_),
        rows(form_ == Form::plain ? rows_ : columns_),
        columns(form_ == Form::plain ? columns_ : rows_),
        stride(columns + kGap),
        matrix(filled(rows, columns, stride, stream), rows, stride, type),
        stored(matrix.values()) {}

  static std::vector<float> filled(std::int64_t rows, std::int64_t columns, std::int64_t stride, std::uint64_t stream) {
    std::vector<float> values = random_floats(rows * stride, stream);
    for (std::int64_t i = 0; i < rows * stride; ++i)
      if (i % stride >= columns) values[i] = std::nanf("");
    return values;
  }
  AnyMatrix view() const { return matrix.view().columns_from(0, columns); }
  double operator()(std::int64_t i, std::int64_t j) const {
    return form == Form::plain ? stored[i * stride + j] : stored[j * stride + i];
  }
};

/// The largest |C - expected| in units of what rounding allows; infinity if the gaps of C were written to.
double largest_excess(const Execution& execution, const Shape& shape, Form a_form, Form b_form, Scalar a_type,
                      Scalar b_type, Scalar c_type, const Factors& factors, decltype(gemm) multiply = gemm) {
  const Operand a(shape.rows, shape.inner, a_form, a_type, 1), b(shape.inner, shape.columns, b_form, b_type, 2);
  const std::int64_t stride = shape.columns + kGap;
  // beta = 0 must not read what C holds.
  const TestMatrix c(factors.beta == 0 ? std::vector<float>(shape.rows * stride, std::nanf(""))
                                       : random_floats(shape.rows * stride, 3),
                     shape.rows, stride, c_type);
  const std::vector<float> before = c.values();
  const device::Buffer<std::byte> workspace(
      gemm_workspace(a_type, b_type, c_type, shape.rows, shape.columns, shape.inner));
  multiply(execution, factors.alpha, a.view(), a_form, b.view(), b_form, factors.beta,
           c.view().columns_from(0, shape.columns), workspace.array());
  const std::vector<float> after = c.values();
  double worst = 0;
  for (std::int64_t i = 0; i < shape.rows; ++i)
    for (std::int64_t j = 0; j < stride; ++j) {
      const std::int64_t at = i * stride + j;
      if (j >= shape.columns) {
        if (float_bits(before[at]) != float_bits(after[at])) return HUGE_VAL;
        continue;
      }
      double sum = 0, magnitude = 0;
      for (std::int64_t k = 0; k < shape.inner; ++k) {
        sum += factors.alpha * a(i, k) * b(k, j);
        magnitude += std::abs(factors.alpha * a(i, k) * b(k, j));
      }
      if (factors.beta != 0) {
        sum += static_cast<double>(factors.beta) * before[at];
        magnitude += std::abs(factors.beta * before[at]);
      }
      // `inner` products summed in fp32 in any order, two scalings and their sum; then one rounding to storage.
      const double error = static_cast<double>(shape.inner + 3) * kRoundoff * magnitude;
      // fp16 below 2^-14 has a spacing of 2^-24.
      const double rounding = c_type == Scalar::bf16   ? kRoundoffBf16 * (std::abs(sum) + error)
                              : c_type == Scalar::fp16 ? kRoundoffHalf * (std::abs(sum) + error) + 0x1p-25
                                                       : 0.0;
      const double allowed = error + rounding;
      worst = std::max(worst, std::isnan(after[at]) ? HUGE_VAL : std::abs(after[at] - sum) / allowed);
    }
  return worst;
}

}  // namespace

TEST_CASE("gemm agrees with sums in float64 for every form, type, factor and shape") {
  for_each_backend([&](const Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const Form a_form : {Form::plain, Form::transposed})
        for (const Form b_form : {Form::plain, Form::transposed})
          for (const Scalar a : kRowTypes)
            for (const Scalar b : kRowTypes)
              for (const Scalar c : kRowTypes)
                for (const Factors& factors : kFactors) {
                  // fp16 with bf16 does not occur.
                  const auto is = [&](Scalar type) { return a == type || b == type || c == type; };
                  if (is(Scalar::fp16) && (is(Scalar::bf16) || a != b)) continue;
                  INFO("rows ", shape.rows, " columns ", shape.columns, " inner ", shape.inner, " forms ",
                       static_cast<int>(a_form), static_cast<int>(b_form), " types ", static_cast<int>(a),
                       static_cast<int>(b), static_cast<int>(c), " beta ", factors.beta);
                  CHECK(largest_excess(execution, shape, a_form, b_form, a, b, c, factors) <= 1);
                }
  });
}

TEST_CASE("by row, a product has the same sums, and bits of a row that do not depend on the other rows") {
  for_each_backend([&](const Execution& execution) {
    for (const Form b_form : {Form::plain, Form::transposed}) {
      for (const Shape& shape : {Shape{1, 1, 1}, {7, 5, 770}, {130, 65, 33}, {133, 40, 600}})
        for (const Scalar type : {Scalar::fp32, Scalar::bf16})
          for (const Factors& factors : kFactors)
            CHECK(largest_excess(execution, shape, Form::plain, b_form, Scalar::fp32, type, Scalar::fp32, factors,
                                 gemm_by_row) <= 1);
      const std::int64_t rows = 133, columns = 40, inner = 600;
      const Operand a(rows, inner, Form::plain, Scalar::fp32, 1), b(inner, columns, b_form, Scalar::fp32, 2);
      const TestMatrix together(std::vector<float>(rows * columns), rows, columns, Scalar::fp32);
      const device::Buffer<std::byte> workspace(
          gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, rows, columns, inner));
      const auto multiply = [&](std::int64_t first, std::int64_t count, const TestMatrix& c) {
        gemm_by_row(execution, 0.3f, a.view().rows_from(first, count), Form::plain, b.view(), b_form, 0.0f, c.view(),
                    workspace.array());
      };
      multiply(0, rows, together);
      const std::vector<float> all = together.values();
      for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, 1}, {5, 7}, {126, 7}, {30, 64}}) {
        const TestMatrix part(std::vector<float>(count * columns), count, columns, Scalar::fp32);
        multiply(first, count, part);
        CHECK(part.values() ==
              std::vector<float>(all.begin() + first * columns, all.begin() + (first + count) * columns));
      }
    }
  });
}

TEST_CASE("a product over no terms scales C, and an empty product does nothing") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : kRowTypes) {
      const device::Buffer<std::byte> workspace(gemm_workspace(Scalar::fp32, Scalar::fp32, type, 2, 3, 0));
      const TestMatrix c({1, 2, 3, 4, 5, 6}, 2, 3, type);
      const AnyMatrix a{nullptr, Scalar::fp32, 2, 0, 0}, b{nullptr, Scalar::fp32, 0, 3, 3};
      gemm(execution, 1.0f, a, Form::plain, b, Form::plain, 0.5f, c.view(), workspace.array());
      CHECK(c.values() == std::vector<float>{0.5f, 1, 1.5f, 2, 2.5f, 3});
      gemm(execution, 1.0f, a, Form::plain, b, Form::plain, 0.0f, c.view(), workspace.array());
      CHECK(c.values() == std::vector<float>(6, 0.0f));
      gemm(execution, 1.0f, a.rows_from(0, 0), Form::plain, b, Form::plain, 0.0f, c.view().rows_from(0, 0), {});
    }
  });
}

TEST_CASE("TF32 changes products of fp32 on a GPU by the rounding of their operands, and nothing else") {
  for_each_backend([&](const Execution& execution) {
    Execution fast = execution;
    fast.tf32 = true;
    for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
      const std::int64_t rows = 128, columns = 96, inner = 256;
      const TestMatrix a(random_floats(rows * inner, 1), rows, inner, type),
          b(random_floats(columns * inner, 2), columns, inner, type);
      const TestMatrix exact(std::vector<float>(rows * columns), rows, columns, Scalar::fp32),
          rounded(std::vector<float>(rows * columns), rows, columns, Scalar::fp32);
      const device::Buffer<std::byte> workspace(gemm_workspace(type, type, Scalar::fp32, rows, columns, inner));
      gemm(execution, 1.0f, a.view(), Form::plain, b.view(), Form::transposed, 0.0f, exact.view(), workspace.array());
      gemm(fast, 1.0f, a.view(), Form::plain, b.view(), Form::transposed, 0.0f, rounded.view(), workspace.array());
      const std::vector<float> want = exact.values(), got = rounded.values();
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < want.size(); ++i) {
        difference += std::pow(static_cast<double>(want[i]) - static_cast<double>(got[i]), 2);
        size += std::pow(static_cast<double>(want[i]), 2);
      }
      // TF32 keeps 11 bits: an error of at most 2^-11 of each operand.
      CHECK(std::sqrt(difference / size) <= 1e-3);
      if (type == Scalar::fp32)
        CHECK((difference > 0) == kCudaBuild);
      else
        CHECK(difference == 0);
    }
  });
}

TEST_CASE("a batch of products is those products, also where matrices of the batch overlap or are the same") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : kRowTypes) {
      const std::int64_t rows = 24, columns = 40, inner = 16, count = 5;
      const TestMatrix a(random_floats((count + rows) * inner, 1), count + rows, inner, type),
          b(random_floats(inner * columns, 2), inner, columns, type);
      const TestMatrix each(std::vector<float>(count * rows * columns), count * rows, columns, Scalar::fp32),
          together(std::vector<float>(count * rows * columns, std::nanf("")), count * rows, columns, Scalar::fp32);
      const device::Buffer<std::byte> workspace(gemm_workspace(type, type, Scalar::fp32, rows, columns, inner));
      // Rows [i, i + rows) of a for product i, the same b for all.
      for (std::int64_t i = 0; i < count; ++i)
        gemm(execution, 1.0f, a.view().rows_from(i, rows), Form::plain, b.view(), Form::plain, 0.0f,
             each.view().rows_from(i * rows, rows), workspace.array());
      gemm_batched(execution, 1.0f, a.view().rows_from(0, rows), Form::plain, b.view(), Form::plain, 0.0f,
                   together.view().rows_from(0, rows), {count, inner, 0, rows * columns}, workspace.array());
      const std::vector<float> want = each.values(), got = together.values();
      // Each is a sum of 16 products of magnitude at most 1 in fp32, in an order that a library may choose.
      for (std::size_t i = 0; i < want.size(); ++i) REQUIRE(std::abs(got[i] - want[i]) <= 2 * 16 * 16 * kRoundoff);
    }
  });
}

TEST_CASE("equal products have equal bits, and a workspace that is too small is refused") {
  for_each_backend([&](const Execution& execution) {
    const Operand a(130, 65, Form::plain, Scalar::bf16, 1), b(65, 40, Form::plain, Scalar::bf16, 2);
    const TestMatrix first(std::vector<float>(130 * 40), 130, 40, Scalar::fp32),
        second(std::vector<float>(130 * 40, 7.0f), 130, 40, Scalar::fp32);
    const device::Buffer<std::byte> workspace(gemm_workspace(Scalar::bf16, Scalar::bf16, Scalar::fp32, 130, 40, 65));
    for (const TestMatrix* c : {&first, &second})
      gemm(execution, 1.0f, a.view(), Form::plain, b.view(), Form::plain, 0.0f, c->view(), workspace.array());
    CHECK(first.values() == second.values());
    CHECK_THROWS(gemm(execution, 1.0f, a.view(), Form::plain, b.view(), Form::plain, 0.0f, first.view(),
                      {workspace.data(), 16}));
  });
}

}  // namespace weft::testing
