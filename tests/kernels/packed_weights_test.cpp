// SPDX-License-Identifier: Apache-2.0
//
// Packed weights against their definition, computed here in fp64: the values of nf4, scales and their codes, nearest
// codes of weights, and the same bits on every backend.
#include "kernels/optimize/packed_weights.hpp"

#include <array>
#include <cmath>
#include <limits>

#include "kernels/optimize/adam.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr Packing kPackings[] = {Packing::int8, Packing::nf4};

/// A packed matrix in the memory of the kernels.
struct Packed {
  Packed(Packing packing, std::int64_t rows, std::int64_t columns)
      : codes(rows * packed_bytes(packing, columns)),
        scales(rows * packed_blocks(columns)),
        rows_of_scales(rows * kRowScales),
        view{.storage = StorageType::bf16,
             .rows = rows,
             .columns = columns,
             .segment = columns,
             .weight = codes.data(),
             .packing = packing,
             .block_scales = scales.data(),
             .row_scales = rows_of_scales.data()} {}

  /// The scale of a block, from the stored numbers.
  double scale(std::int64_t row, std::int64_t block) const {
    const std::vector<float> pairs = rows_of_scales.values();
    const std::uint8_t code = scales.values()[row * packed_blocks(view.columns) + block];
    const double middle = pairs[row * 2], step = pairs[row * 2 + 1];
    return std::max(0.0, middle + step * (static_cast<double>(code) - 127));
  }
  std::vector<float> unpacked(const Execution& execution, Scalar type = Scalar::bf16) const {
    const TestMatrix out(std::vector<float>(view.rows * view.columns), view.rows, view.columns, type);
    unpack_weights(execution, view, 0, out.view());
    return out.values();
  }

  DeviceArray<std::uint8_t> codes, scales;
  DeviceArray<float> rows_of_scales;
  const ParameterRows view;
};

/// The number below which a standard normal number lies with this probability.
double normal_quantile(double probability) {
  double low = -10, high = 10;
  for (int i = 0; i < 200; ++i) {
    const double middle = (low + high) / 2;
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < probability ? low : high) = middle;
  }
  return low;
}

/// Values of all codes for a scale of 1.
std::vector<double> code_values(Packing packing) {
  std::vector<double> values;
  for (int code = 0; packing == Packing::nf4 && code < 16; ++code) values.push_back(double{normal_value(code)});
  for (int code = -127; packing == Packing::int8 && code <= 127; ++code) values.push_back(code / 127.0);
  return values;
}

void pack(const Execution& execution, const Packed& packed, const std::vector<float>& weights) {
  const DeviceArray<float> device_weights(weights);
  weights_from_float(execution, packed.view, 0, device_weights.matrix(packed.view.rows, packed.view.columns));
}

/// Weights whose blocks and rows have different magnitudes.
std::vector<float> uneven_weights(std::int64_t rows, std::int64_t columns) {
  std::vector<float> weights = random_floats(rows * columns, 3);
  for (std::int64_t i = 0; i < rows * columns; ++i)
    weights[i] *=
        0.02f * static_cast<float>(1 + i % columns / kPackedColumns % 5) * static_cast<float>(1 + i / columns);
  return weights;
}

}  // namespace

TEST_CASE("the values of nf4 are quantiles of the normal distribution") {
  // Dettmers et al. 2023: evenly spaced probabilities, 8 above one half and 7 below it, from 1 - (1/32 + 1/30) / 2 on.
  const double last = 1 - (1.0 / 32 + 1.0 / 30) / 2, largest = normal_quantile(last);
  std::vector<double> expected;
  for (int i = 0; i < 7; ++i) expected.push_back(-normal_quantile(last + (0.5 - last) * i / 7) / largest);
  for (int i = 8; i >= 0; --i) expected.push_back(normal_quantile(last + (0.5 - last) * i / 8) / largest);
  REQUIRE(expected.size() == 16);
  for (int code = 0; code < 16; ++code)
    CHECK(std::abs(double{normal_value(code)} - expected[static_cast<std::size_t>(code)]) < 1e-6);
}

TEST_CASE("scales lie within half a step of the largest magnitudes, and every code is the nearest one") {
  for_each_backend([&](const Execution& execution) {
    for (const Packing packing : kPackings)
      for (const std::int64_t columns : {1, 7, 64, 129, 1000}) {
        CAPTURE(columns);
        const std::int64_t rows = 3, blocks = packed_blocks(columns);
        const std::vector<float> weights = uneven_weights(rows, columns);
        const Packed packed(packing, rows, columns);
        pack(execution, packed, weights);
        const std::vector<float> unpacked = packed.unpacked(execution);
        const std::vector<double> values = code_values(packing);
        for (std::int64_t row = 0; row < rows; ++row) {
          std::vector<double> largest(static_cast<std::size_t>(blocks));
          for (std::int64_t c = 0; c < columns; ++c) {
            double& most = largest[static_cast<std::size_t>(c / kPackedColumns)];
            most = std::max(most, std::abs(double{weights[row * columns + c]}));
          }
          const auto [least, most] = std::minmax_element(largest.begin(), largest.end());
          for (std::int64_t block = 0; block < blocks; ++block) {
            const double scale = packed.scale(row, block), exact = largest[static_cast<std::size_t>(block)];
            REQUIRE(std::abs(scale - exact) <= (*most - *least) / 508 + 4 * kRoundoff * *most);
            const std::int64_t begin = block * kPackedColumns, end = std::min(begin + kPackedColumns, columns);
            for (std::int64_t c = begin; c < end; ++c) {
              const double weight = weights[row * columns + c];
              double nearest = std::numeric_limits<double>::max();
              for (const double value : values) nearest = std::min(nearest, std::abs(scale * value - weight));
              // Of codes that are equally near but for rounding either is right; then the value is rounded to bf16.
              REQUIRE(std::abs(unpacked[row * columns + c] - weight) <=
                      nearest + (kRoundoffBf16 + 8 * kRoundoff) * (std::abs(weight) + nearest));
            }
          }
        }
      }
  });
}

TEST_CASE("unpacked weights are the codes times their unit, in the order of the definition, to the bit") {
  for_each_backend([&](const Execution& execution) {
    for (const Packing packing : kPackings)
      for (const std::int64_t columns : {5, 64, 72, 512}) {
        const std::int64_t rows = 4, bytes = packed_bytes(packing, columns), blocks = packed_blocks(columns);
        const Packed packed(packing, rows, columns);
        pack(execution, packed, uneven_weights(rows, columns));
        const std::vector<std::uint8_t> codes = packed.codes.values(), scales = packed.scales.values();
        const std::vector<float> pairs = packed.rows_of_scales.values(), unpacked = packed.unpacked(execution),
                                 wide = packed.unpacked(execution, Scalar::fp32);
        for (std::int64_t i = 0; i < rows * columns; ++i) {
          const std::int64_t row = i / columns, c = i % columns;
          const float scale =
              std::fma(pairs[row * 2 + 1], static_cast<float>(scales[row * blocks + c / kPackedColumns]) - 127.0f,
                       pairs[row * 2]);
          const std::uint8_t byte = codes[row * bytes + (packing == Packing::nf4 ? c / 2 : c)];
          const float expected = packing == Packing::nf4
                                     ? scale * normal_value(c % 2 == 0 ? byte >> 4 : byte & 15)
                                     : scale * (1.0f / 127.0f) * static_cast<float>(static_cast<std::int8_t>(byte));
          REQUIRE(unpacked[i] == float{to_bf16(expected)});
          REQUIRE(wide[i] == unpacked[i]);
        }
      }
  });
}

TEST_CASE("packing has the same bits on every backend, for all rows at once or one by one") {
  for (const Packing packing : kPackings) {
    const std::int64_t rows = 5, columns = 200;
    const std::vector<float> weights = uneven_weights(rows, columns);
    const Packed expected(packing, rows, columns);
    Execution portable = execution();
    portable.backend = Backend::portable;
    pack(portable, expected, weights);
    const DeviceArray<float> device_weights(weights);
    for_each_backend([&](const Execution& execution) {
      const Packed packed(packing, rows, columns);
      for (std::int64_t row = 0; row < rows; ++row)
        weights_from_float(execution, packed.view, row, {device_weights.data() + row * columns, 1, columns, columns});
      CHECK(packed.codes.values() == expected.codes.values());
      CHECK(packed.scales.values() == expected.scales.values());
      CHECK(packed.rows_of_scales.values() == expected.rows_of_scales.values());
      const DeviceArray<float> one_row(columns);
      weights_to_float(execution, packed.view, 3, one_row.matrix(1, columns));
      const std::vector<float> all = packed.unpacked(execution), one = one_row.values();
      for (std::int64_t c = 0; c < columns; ++c) CHECK(one[c] == all[3 * columns + c]);
    });
  }
}

TEST_CASE("blocks of one magnitude keep it; zeros stay zeros; a weight that is not finite makes its row NaN") {
  for_each_backend([&](const Execution& execution) {
    for (const Packing packing : kPackings) {
      const std::int64_t rows = 5, columns = 128;
      std::vector<float> weights(rows * columns, 0.0f);
      for (std::int64_t c = 0; c < columns; ++c) {
        weights[columns + c] = c % 2 == 0 ? 0.25f : -0.25f;
        weights[3 * columns + c] = weights[4 * columns + c] = 0.5f;
      }
      weights[2 * columns + 70] = 1.0f;  // the other block is zero
      weights[3 * columns + 5] = std::numeric_limits<float>::quiet_NaN();
      weights[4 * columns + 100] = std::numeric_limits<float>::infinity();
      const Packed packed(packing, rows, columns);
      pack(execution, packed, weights);
      const std::vector<float> unpacked = packed.unpacked(execution);
      for (std::int64_t i = 0; i < 3 * columns; ++i) CHECK(unpacked[i] == doctest::Approx(weights[i]).epsilon(1e-6));
      for (std::int64_t i = 3 * columns; i < rows * columns; ++i) CHECK(std::isnan(unpacked[i]));
    }
  });
}

}  // namespace weft::testing
