// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/fp8.hpp"

#include <cstring>
#include <limits>

#include "kernels/language/activation/coded_activation.hpp"
#include "kernels/language/linear/linear.hpp"
#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr CodeType kCodeTypes[] = {CodeType::e4m3, CodeType::e5m2};

std::int32_t bits_of(float value) {
  std::int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

/// A matrix in codes with its transpose, coded with the scale of its largest magnitude times `scale_factor`.
struct Coded {
  std::int64_t rows, columns;
  CodeType type;
  DeviceArray<std::uint8_t> codes, transposed;
  DeviceArray<float> scale;
  DeviceArray<std::int32_t> largest;

  Coded(const Execution& execution, AnyMatrix from, CodeType code_type, float scale_factor = 1)
      : rows(from.rows),
        columns(from.columns),
        type(code_type),
        codes(rows * columns),
        transposed(rows * columns),
        scale(kScaleStride),
        largest(1) {
    largest_magnitude(execution, from, largest.data());
    form_scales(execution, largest.array(), type, scale.array());
    scale.set(std::vector<float>(kScaleStride, scale.values()[0] * scale_factor));
    code_matrix(execution, from,
                {.type = type,
                 .codes = {codes.data(), rows, columns, columns},
                 .transposed = {transposed.data(), columns, rows, rows},
                 .scale = scale.data(),
                 .largest = largest.data()});
  }
  CodedMatrix view() const { return {{codes.data(), rows, columns, columns}, type, scale.data()}; }
  CodedMatrix transposed_view() const { return {{transposed.data(), columns, rows, rows}, type, scale.data()}; }
  /// Values as the codes keep them.
  std::vector<double> values() const {
    std::vector<double> out;
    const auto factor = static_cast<double>(scale.values()[0]);
    for (const std::uint8_t code : codes.values())
      out.push_back(static_cast<double>(value_of_code(type, code)) * factor);
    return out;
  }
};

/// Magnitudes from 2^-24 to 1, and zeros.
std::vector<float> spread(std::int64_t size, std::uint64_t stream) {
  std::vector<float> values = random_floats(size, stream);
  for (std::int64_t i = 0; i < size; ++i) values[i] *= i % 17 == 3 ? 0.0f : std::exp2(static_cast<float>(-(i % 25)));
  return values;
}

}  // namespace

TEST_CASE(
    "e5m2: every code is the nearest of its own value, and numbers between two codes go to the nearer, even one") {
  double before = 0;
  for (int code = 0; code <= 0x7b; ++code) {
    const auto value = static_cast<double>(wide_code_to_float(static_cast<std::uint8_t>(code)));
    // The definition: bias 15, subnormals below 2^-14.
    const int exponent = code >> 2, fraction = code & 3;
    REQUIRE(value == (exponent == 0 ? std::ldexp(fraction, -16) : std::ldexp(4 + fraction, exponent - 17)));
    REQUIRE(wide_code_nearest(static_cast<float>(value)) == code);
    REQUIRE(wide_code_nearest(static_cast<float>(-value)) == (code | 0x80));
    if (code == 0) continue;
    const auto middle = static_cast<float>((before + value) / 2);
    REQUIRE(wide_code_nearest(middle) == (code % 2 == 0 ? code : code - 1));
    REQUIRE(wide_code_nearest(std::nextafter(middle, 1e9f)) == code);
    REQUIRE(wide_code_nearest(std::nextafter(middle, 0.0f)) == code - 1);
    before = value;
  }
  CHECK(wide_code_nearest(1e9f) == 0x7b);
  CHECK(wide_code_nearest(std::nanf("")) == 0x7f);
  CHECK(std::isnan(wide_code_to_float(0x7f)));
  CHECK(std::isinf(wide_code_to_float(0x7c)));
}

TEST_CASE(
    "a scale is the power of two with which the largest magnitude is above a quarter and at most half of the largest "
    "code") {
  for (const CodeType type : kCodeTypes) {
    const double most = type == CodeType::e4m3 ? 448 : 57344;
    for (const float largest :
         {1e-20f, 0.001f, 0.8749f, 0.875f, std::nextafter(0.875f, 1.0f), 1.0f, 1.75f, 3.0f, 448.0f, 1e20f}) {
      CAPTURE(largest);
      const double scale = code_scale(bits_of(largest), type);
      CHECK(std::exp2(std::round(std::log2(scale))) == scale);
      CHECK(static_cast<double>(largest) / scale <= most / 2);
      CHECK(static_cast<double>(largest) / scale > most / 4);
    }
    for (const float other : {0.0f, std::numeric_limits<float>::infinity(), std::nanf("")})
      CHECK(code_scale(magnitude_bits(other), type) == 1.0f);
  }
}

TEST_CASE("codes, their transpose and the largest magnitude are those of the definition, bit for bit") {
  for_each_backend([&](const Execution& execution) {
    int margins = 0;
    for (const auto& [rows, columns] : {std::pair{16, 16}, {48, 272}, {128, 128}, {144, 768}, {400, 48}, {33, 20}})
      for (const Scalar stored : kRowTypes)
        for (const CodeType type : kCodeTypes)
          for (const float factor : {1.0f, 0x1p-3f}) {  // the smaller scale lets values saturate
            CAPTURE(rows);
            CAPTURE(columns);
            CAPTURE(factor);
            const Rows from(spread(rows * columns, 1), rows, columns, stored, kMargins[margins++ % 3]);
            const Coded coded(execution, from.view(), type, factor);
            const std::vector<float> kept = from.values();
            float largest = 0;
            for (const float value : kept) largest = std::max(largest, std::abs(value));
            REQUIRE(coded.largest.values()[0] == bits_of(largest));
            const float scale = coded.scale.values()[0];
            REQUIRE(scale == code_scale(bits_of(largest), type) * factor);
            const std::vector<std::uint8_t> codes = coded.codes.values(), transposed = coded.transposed.values();
            bool saturates = false;
            for (std::int64_t i = 0; i < rows; ++i)
              for (std::int64_t j = 0; j < columns; ++j) {
                const std::uint8_t want = code_of_value(type, kept[i * columns + j] / scale);
                REQUIRE(codes[i * columns + j] == want);
                REQUIRE(transposed[j * rows + i] == want);
                saturates = saturates || (want & 0x7f) == (type == CodeType::e4m3 ? 0x7e : 0x7b);
              }
            CHECK(saturates == (factor < 1));
          }
  });
}

TEST_CASE("sums over blocks of rows are formed in passing") {
  for_each_backend([&](const Execution& execution) {
    for (const auto& [rows, columns] : {std::pair{16, 16}, {128, 128}, {400, 272}})
      for (const CodeType type : kCodeTypes) {
        CAPTURE(rows);
        const std::int64_t blocks = (rows + kCodeRows - 1) / kCodeRows;
        const Rows from(random_floats(rows * columns, 1), rows, columns, Scalar::bf16);
        const DeviceArray<float> scale(std::vector<float>{0.25f}), sums(blocks * columns);
        const DeviceArray<std::uint8_t> codes(rows * columns);
        code_matrix(execution, from.view(),
                    {.type = type,
                     .codes = {codes.data(), rows, columns, columns},
                     .scale = scale.data(),
                     .sums = {sums.data(), blocks, columns, columns}});
        const std::vector<float> kept = from.values();
        std::vector<double> want(static_cast<std::size_t>(blocks * columns));
        for (std::int64_t i = 0; i < rows; ++i)
          for (std::int64_t j = 0; j < columns; ++j)
            want[i / kCodeRows * columns + j] += static_cast<double>(kept[i * columns + j]);
        CHECK(relative_error(sums.values(), want) <= 1e-6);
      }
  });
}

TEST_CASE("activations in codes are the codes of activations") {
  for_each_backend([&](const Execution& execution) {
    for (const MlpActivation activation : {MlpActivation::gelu, MlpActivation::swiglu, MlpActivation::geglu,
                                           MlpActivation::relu2, MlpActivation::gelu_exact})
      for (const auto& [rows, columns] : {std::pair{16, 16}, {144, 272}, {256, 384}}) {
        CAPTURE(static_cast<int>(activation));
        CAPTURE(columns);
        const std::int64_t width = is_gated(activation) ? 2 * columns : columns;
        const Rows x(random_floats(rows * width, 1), rows, width, Scalar::bf16),
            dy(random_floats(rows * columns, 2), rows, columns, Scalar::bf16), y(rows, columns, Scalar::bf16),
            dx(rows, width, Scalar::bf16), memory(rows, width, Scalar::bf16);
        mlp_activation(execution, activation, x.view(), y.view());
        mlp_activation_backward(execution, activation, x.view(), dy.view(), dx.view());
        const std::int64_t blocks = (rows + kCodeRows - 1) / kCodeRows;
        const DeviceArray<float> sums(blocks * width), same_sums(blocks * width);
        // Both kernels round the same value; a compiler may contract products and sums in one of them only.
        const auto check = [&](const Coding& given, const Coded& want, const auto& code) {
          DeviceArray<std::uint8_t> codes(want.rows * want.columns), transposed(want.rows * want.columns);
          const DeviceArray<std::int32_t> largest(1);
          Coding coding = given;
          coding.type = want.type;
          coding.codes = {codes.data(), want.rows, want.columns, want.columns};
          coding.transposed = {transposed.data(), want.columns, want.rows, want.rows};
          coding.scale = want.scale.data();
          coding.largest = largest.data();
          code(coding);
          const std::vector<std::uint8_t> got = codes.values(), across = transposed.values(),
                                          same = want.codes.values();
          std::int64_t different = 0;
          bool transposes = true;
          for (std::int64_t i = 0; i < want.rows; ++i)
            for (std::int64_t j = 0; j < want.columns; ++j) {
              const int a = got[i * want.columns + j], b = same[i * want.columns + j];
              different += a != b;
              CHECK(std::abs(a - b) <= 1);
              transposes = transposes && across[j * want.rows + i] == a;
            }
          CHECK(transposes);
          CHECK(different <= want.rows * want.columns / 500);
          CHECK(std::abs(largest.values()[0] - want.largest.values()[0]) <= 1 << 16);  // a unit of bf16
        };
        const Coded of_y(execution, y.view(), CodeType::e4m3), of_dx(execution, dx.view(), CodeType::e5m2);
        check({}, of_y, [&](const Coding& coding) {
          code_activation(execution, activation, x.view(), memory.view().columns_from(0, columns), coding);
        });
        check({.sums = {sums.data(), blocks, width, width}}, of_dx, [&](const Coding& coding) {
          code_activation_backward(execution, activation, x.view(), dy.view(), memory.view(), coding);
        });
        const DeviceArray<std::uint8_t> codes(rows * width);
        code_matrix(execution, dx.view(),
                    {.type = CodeType::e5m2,
                     .codes = {codes.data(), rows, width, width},
                     .scale = of_dx.scale.data(),
                     .sums = {same_sums.data(), blocks, width, width}});
        std::vector<double> want;
        for (const float sum : same_sums.values()) want.push_back(static_cast<double>(sum));
        CHECK(relative_error(sums.values(), want) <= 1e-4);
      }
  });
}

TEST_CASE("the largest magnitude is raised, and kept where it is finite and not 0") {
  for_each_backend([&](const Execution& execution) {
    const Rows from(random_floats(48 * 64, 1), 48, 64, Scalar::bf16);
    const DeviceArray<float> scale(std::vector<float>{1.0f});
    const DeviceArray<std::uint8_t> codes(48 * 64);
    const DeviceArray<std::int32_t> largest(std::vector<std::int32_t>{bits_of(1e6f)});
    code_matrix(execution, from.view(),
                {.codes = {codes.data(), 48, 64, 64}, .scale = scale.data(), .largest = largest.data()});
    CHECK(largest.values()[0] == bits_of(1e6f));

    const DeviceArray<std::int32_t> found(std::vector<std::int32_t>{0, bits_of(2.0f), kInfinityBits, 0x7fc00000}),
        kept(std::vector<std::int32_t>{5, 6, 7, 8});
    keep_largest(execution, found.array(), kept.array());
    CHECK(kept.values() == std::vector<std::int32_t>{5, bits_of(2.0f), 7, 8});
    CHECK(found.values() == std::vector<std::int32_t>(4));
  });
}

TEST_CASE("products in codes are those of the decoded operands: forward, of gradients, and added to fp32") {
  struct Shape {
    std::int64_t rows, columns, inner;
  };
  for_each_backend([&](const Execution& execution) {
    if (!coded_obstacle(execution.backend).empty()) return;
    for (const Shape& s : {Shape{16, 16, 16}, {64, 192, 256}, {144, 48, 272}, {256, 128, 768}})
      for (const auto& [of_a, of_b] : {std::pair{CodeType::e4m3, CodeType::e4m3},
                                       {CodeType::e5m2, CodeType::e4m3},
                                       {CodeType::e4m3, CodeType::e5m2}})
        for (const Scalar type : {Scalar::bf16, Scalar::fp32})
          for (const bool by_transposes : {false, true}) {
            CAPTURE(s.rows);
            CAPTURE(by_transposes);
            const auto operand = [&](std::int64_t size, std::uint64_t stream, CodeType code) {
              const Rows rows(random_floats(size * s.inner, stream), by_transposes ? s.inner : size,
                              by_transposes ? size : s.inner, Scalar::bf16);
              return Coded(execution, rows.view(), code);
            };
            const Coded a = operand(s.rows, 1, of_a), b = operand(s.columns, 2, of_b);
            const std::vector<float> before = random_floats(s.rows * s.columns, 3);
            const Rows c(before, s.rows, s.columns, type);
            const DeviceArray<std::byte> workspace(
                gemm_coded_workspace(execution.backend, type, s.rows, s.columns, s.inner));
            const bool adds = type == Scalar::fp32;
            gemm_coded(execution, by_transposes ? a.transposed_view() : a.view(),
                       by_transposes ? b.transposed_view() : b.view(), adds ? 1.0f : 0.0f, c.view(), false,
                       workspace.array());
            const std::vector<double> as = a.values(), bs = b.values();
            std::vector<double> want;
            for (std::int64_t i = 0; i < s.rows; ++i)
              for (std::int64_t j = 0; j < s.columns; ++j) {
                double sum = adds ? static_cast<double>(before[i * s.columns + j]) : 0;
                for (std::int64_t k = 0; k < s.inner; ++k)
                  sum += by_transposes ? as[k * s.rows + i] * bs[k * s.columns + j]
                                       : as[i * s.inner + k] * bs[j * s.inner + k];
                want.push_back(sum);
              }
            // One rounding to bf16; and sums that a GPU's matrix units keep with fewer bits than fp32.
            CHECK(relative_error(c.values(), want) <= (adds ? 1e-3 : 4e-3));
          }
  });
}

TEST_CASE("a product in codes errs by the rounding of its operands") {
  for_each_backend([&](const Execution& execution) {
    if (!coded_obstacle(execution.backend).empty()) return;
    const std::int64_t rows = 64, columns = 96, inner = 512;
    const Rows x(random_floats(rows * inner, 1), rows, inner, Scalar::bf16),
        w(random_floats(columns * inner, 2), columns, inner, Scalar::bf16), y(rows, columns, Scalar::bf16);
    const std::vector<float> xs = x.values(), ws = w.values();
    std::vector<double> want;
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) {
        double sum = 0;
        for (std::int64_t k = 0; k < inner; ++k)
          sum += static_cast<double>(xs[i * inner + k]) * static_cast<double>(ws[j * inner + k]);
        want.push_back(sum);
      }
    const DeviceArray<std::byte> workspace(gemm_coded_workspace(execution.backend, Scalar::bf16, rows, columns, inner));
    for (const CodeType type : kCodeTypes) {
      const Coded a(execution, x.view(), type), b(execution, w.view(), CodeType::e4m3);
      gemm_coded(execution, a.view(), b.view(), 0, y.view(), true, workspace.array());
      // Codes err by up to 2^-4 (e5m2: 2^-3) relative, 2.5 % (5 %) root mean square; sums of a GPU with 14 bits.
      CHECK(relative_error(y.values(), want) <= (type == CodeType::e4m3 ? 0.05 : 0.08));
    }
  });
}

TEST_CASE("a product in codes with a bias is the product plus the bias") {
  for_each_backend([&](const Execution& execution) {
    if (!coded_obstacle(execution.backend).empty()) return;
    const std::int64_t rows = 144, columns = 48, inner = 272;
    const Rows x(random_floats(rows * inner, 1), rows, inner, Scalar::bf16),
        weight(random_floats(columns * inner, 2), columns, inner, Scalar::bf16);
    const std::vector<float> values = random_floats(columns, 3);
    const DeviceArray<float> bias(values);
    std::vector<bf16> rounded_values;
    for (const float value : values) rounded_values.push_back(to_bf16(value));
    const DeviceArray<bf16> rounded(rounded_values);
    const Coded a(execution, x.view(), CodeType::e4m3), b(execution, weight.view(), CodeType::e4m3);
    const DeviceArray<std::byte> workspace(gemm_coded_workspace(execution.backend, Scalar::bf16, rows, columns, inner));
    const std::vector<double> as = a.values(), bs = b.values();
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
          for (std::int64_t k = 0; k < inner; ++k) sum += as[i * inner + k] * bs[j * inner + k];
          want.push_back(sum);
        }
      // The product and the sum are rounded to bf16, or the bias and the sum.
      CHECK(relative_error(y.values(), want) <= 6e-3);
    }
  });
}

TEST_CASE("an element that is not finite makes its row and its column of products NaN") {
  for_each_backend([&](const Execution& execution) {
    if (!coded_obstacle(execution.backend).empty()) return;
    for (const CodeType type : kCodeTypes)
      for (const float bad :
           {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::nanf("")}) {
        std::vector<float> values = random_floats(32 * 32, 1);
        values[32 + 5] = bad;
        const Rows x(values, 32, 32, Scalar::bf16), weight(random_floats(16 * 32, 2), 16, 32, Scalar::bf16);
        const Coded a(execution, x.view(), type), b(execution, weight.view(), CodeType::e4m3);
        const DeviceArray<std::byte> workspace(gemm_coded_workspace(execution.backend, Scalar::bf16, 32, 16, 32));
        for (const bool transposed : {false, true}) {
          const Rows y(32, 16, Scalar::bf16);
          gemm_coded(execution, transposed ? a.transposed_view() : a.view(), b.view(), 0, y.view(), false,
                     workspace.array());
          const std::vector<float> got = y.values();
          for (std::size_t i = 0; i < got.size(); ++i) CHECK(std::isnan(got[i]) == (i / 16 == (transposed ? 5 : 1)));
        }
      }
  });
}

}  // namespace weft::testing
