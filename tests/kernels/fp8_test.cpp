// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/fp8.hpp"

#include <limits>

#include "kernels/language/linear/linear.hpp"
#include "kernels/optimize/codec.hpp"
#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

/// A matrix in codes with its memory.
struct Coded {
  std::int64_t rows, columns;
  DeviceArray<std::byte> memory;

  Coded(const Execution& execution, AnyMatrix from, Form form)
      : rows(form == Form::plain ? from.rows : from.columns),
        columns(form == Form::plain ? from.columns : from.rows),
        memory(coded_bytes(rows, columns)) {
    code_rows(execution, from, form, view());
  }
  CodedRows view() const { return coded_rows(memory.array(), rows, columns); }
  std::uint8_t code(const std::vector<std::byte>& bytes, std::int64_t i, std::int64_t j) const {
    return static_cast<std::uint8_t>(bytes[static_cast<std::size_t>(i * columns + j)]);
  }
  float scale(const std::vector<std::byte>& bytes, std::int64_t i) const {
    const std::ptrdiff_t begin = reinterpret_cast<const std::byte*>(view().scales.data) - memory.data();
    float value;
    std::memcpy(&value, bytes.data() + begin + 4 * i, sizeof value);
    return value;
  }
};

/// Values as codes keep them, one scale per row.
std::vector<double> decoded(const Coded& coded) {
  const std::vector<std::byte> bytes = coded.memory.values();
  std::vector<double> values;
  for (std::int64_t i = 0; i < coded.rows; ++i)
    for (std::int64_t j = 0; j < coded.columns; ++j)
      values.push_back(static_cast<double>(code_to_float(coded.code(bytes, i, j))) *
                       static_cast<double>(coded.scale(bytes, i)));
  return values;
}

/// Rows of very different magnitudes, one of them zero.
std::vector<float> uneven(std::int64_t rows, std::int64_t columns, std::uint64_t stream) {
  std::vector<float> values = random_floats(rows * columns, stream);
  for (std::int64_t i = 0; i < rows * columns; ++i)
    values[i] *= i / columns == 2 ? 0.0f : std::exp2(static_cast<float>(i / columns % 7 - 3));
  return values;
}

}  // namespace

TEST_CASE("a row in codes has the scale of its largest element and the nearest codes, by rows and by columns") {
  // The definition leaves nothing to rounding: every backend gives its bits.
  for_each_backend([&](const Execution& execution) {
    int margins = 0;
    for (const auto& [rows, columns] : {std::pair{33, 16}, {16, 1040}, {40, 272}, {33, 768}, {8, 3072}, {5, 8208}})
      for (const Scalar type : kRowTypes)
        for (const Form form : {Form::plain, Form::transposed}) {
          CAPTURE(rows);
          CAPTURE(columns);
          const std::vector<float> values = uneven(rows, columns, 1);
          const bool plain = form == Form::plain;
          std::vector<float> given(values.size());
          for (std::int64_t i = 0; i < rows; ++i)
            for (std::int64_t j = 0; j < columns; ++j)
              given[plain ? i * columns + j : j * rows + i] = values[i * columns + j];
          const Rows from(given, plain ? rows : columns, plain ? columns : rows, type, kMargins[margins++ / 2 % 3]);
          const std::vector<float> kept = from.values();
          const Coded coded(execution, from.view(), form);
          const std::vector<std::byte> bytes = coded.memory.values();
          for (std::int64_t i = 0; i < rows; ++i) {
            const auto value = [&](std::int64_t j) { return kept[plain ? i * columns + j : j * rows + i]; };
            float largest = 0;
            for (std::int64_t j = 0; j < columns; ++j) largest = std::max(largest, std::abs(value(j)));
            const float scale = block_scale(largest);
            REQUIRE(coded.scale(bytes, i) == scale);
            for (std::int64_t j = 0; j < columns; ++j)
              REQUIRE(coded.code(bytes, i, j) == code_nearest(value(j) * inverse_scale(scale)));
          }
        }
  });
}

TEST_CASE("products in codes are those of the decoded operands, close to those of the operands themselves") {
  struct Shape {
    std::int64_t rows, columns, inner;
  };
  for_each_backend([&](const Execution& execution) {
    if (!coded_obstacle(execution.backend).empty()) return;
    for (const Shape& s : {Shape{1, 16, 16}, {7, 64, 768}, {130, 48, 272}, {64, 192, 256}})
      for (const Form form : {Form::plain, Form::transposed}) {
        CAPTURE(s.rows);
        const Rows x(uneven(s.rows, s.inner, 1), s.rows, s.inner, Scalar::bf16);
        const std::vector<float> of_weight = random_floats(s.columns * s.inner, 2);
        const Rows weight(of_weight, form == Form::plain ? s.columns : s.inner,
                          form == Form::plain ? s.inner : s.columns, Scalar::bf16);
        const Rows y(s.rows, s.columns, Scalar::bf16);
        const Coded a(execution, x.view(), Form::plain), b(execution, weight.view(), form);
        const DeviceArray<std::byte> workspace(gemm_coded_workspace(execution.backend, s.rows, s.columns, s.inner));
        gemm_coded(execution, a.view(), b.view(), y.view(), workspace.array());
        const std::vector<double> da = decoded(a), db = decoded(b);
        const std::vector<float> xs = x.values(), ws = weight.values();
        std::vector<double> want, exact;
        for (std::int64_t i = 0; i < s.rows; ++i)
          for (std::int64_t j = 0; j < s.columns; ++j) {
            double sum = 0, other = 0;
            for (std::int64_t k = 0; k < s.inner; ++k) {
              sum += da[i * s.inner + k] * db[j * s.inner + k];
              other += static_cast<double>(xs[i * s.inner + k]) *
                       static_cast<double>(ws[form == Form::plain ? j * s.inner + k : k * s.columns + j]);
            }
            want.push_back(sum);
            exact.push_back(other);
          }
        // One rounding of the result to bf16, and sums that a GPU's matrix units keep with fewer bits than fp32.
        CHECK(relative_error(y.values(), want) <= 4e-3);
        // Codes of both operands err by up to 2^-4 relative, 2.5 % root mean square each.
        CHECK(relative_error(y.values(), exact) <= 0.08);
      }
  });
}

TEST_CASE("a product in codes with a bias is the product plus the bias") {
  for_each_backend([&](const Execution& execution) {
    if (!coded_obstacle(execution.backend).empty()) return;
    const std::int64_t rows = 130, columns = 48, inner = 272;
    const Rows x(uneven(rows, inner, 1), rows, inner, Scalar::bf16),
        weight(random_floats(columns * inner, 2), columns, inner, Scalar::bf16);
    const std::vector<float> values = random_floats(columns, 3);
    const DeviceArray<float> bias(values);
    std::vector<bf16> rounded_values;
    for (const float value : values) rounded_values.push_back(to_bf16(value));
    const DeviceArray<bf16> rounded(rounded_values);
    const Coded a(execution, x.view(), Form::plain), b(execution, weight.view(), Form::plain);
    const DeviceArray<std::byte> workspace(gemm_coded_workspace(execution.backend, rows, columns, inner));
    const std::vector<double> da = decoded(a), db = decoded(b);
    for (const bool with_rounded : {false, true}) {
      CAPTURE(with_rounded);
      LinearWeights weights{.matrix = weight.view(), .bias = bias.array()};
      if (with_rounded) weights.rounded_bias = rounded.array();
      const Rows y(rows, columns, Scalar::bf16);
      linear_coded(execution, weights, b.view(), a.view(), y.view(), workspace.array());
      std::vector<double> want;
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t j = 0; j < columns; ++j) {
          double sum = static_cast<double>(values[j]);
          for (std::int64_t k = 0; k < inner; ++k) sum += da[i * inner + k] * db[j * inner + k];
          want.push_back(sum);
        }
      // The product and the sum are rounded to bf16, or the bias and the sum.
      CHECK(relative_error(y.values(), want) <= 6e-3);
    }
  });
}

TEST_CASE("an operand that is not finite makes its row of the product NaN") {
  for_each_backend([&](const Execution& execution) {
    if (!coded_obstacle(execution.backend).empty()) return;
    for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      std::vector<float> values = random_floats(3 * 32, 1);
      values[32 + 5] = bad;
      const Rows x(values, 3, 32, Scalar::bf16), weight(random_floats(16 * 32, 2), 16, 32, Scalar::bf16);
      const Rows y(3, 16, Scalar::bf16);
      const Coded a(execution, x.view(), Form::plain), b(execution, weight.view(), Form::plain);
      const DeviceArray<std::byte> workspace(gemm_coded_workspace(execution.backend, 3, 16, 32));
      gemm_coded(execution, a.view(), b.view(), y.view(), workspace.array());
      const std::vector<float> got = y.values();
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(std::isnan(got[i]) == (i / 16 == 1));
    }
  });
}

}  // namespace weft::testing
