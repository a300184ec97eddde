// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "kernels/convert/convert_rows.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

/// Raw rows as stored in a file: 4 or 2 bytes per element.
DeviceArray<std::uint8_t> raw_bytes(const std::vector<float>& values, Scalar type) {
  std::vector<std::uint8_t> bytes;
  for (const float value : values) {
    std::uint32_t bits = float_bits(value);
    if (type == Scalar::bf16) bits = to_bf16(value).bits;
    if (type == Scalar::fp16) {
      // Quarters below 512 and infinity are all these tests use: exact in half.
      const float magnitude = std::abs(value);
      std::uint32_t half_bits = 0x7c00;
      if (std::isnan(value)) half_bits = 0x7e00;
      if (magnitude == 0) half_bits = 0;
      if (std::isfinite(value) && magnitude > 0)
        half_bits = ((float_bits(magnitude) >> 13) & 0x3ff) | (((float_bits(magnitude) >> 23) - 112) << 10);
      bits = half_bits | (std::signbit(value) ? 0x8000 : 0);
    }
    for (int byte = 0; byte < (type == Scalar::fp32 ? 4 : 2); ++byte)
      bytes.push_back(static_cast<std::uint8_t>(bits >> (8 * byte)));
  }
  return DeviceArray<std::uint8_t>(bytes);
}

}  // namespace

TEST_CASE("normalise_rows reads fp32, fp16 and bf16 exactly and rounds once to the requested type") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const std::int64_t columns : {1, 7, 384, 770})
      for (const Scalar raw_type : {Scalar::fp32, Scalar::fp16, Scalar::bf16})
        for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
          const std::int64_t rows = 3;
          std::vector<float> values(rows * columns);
          for (std::size_t i = 0; i < values.size(); ++i)
            values[i] = (static_cast<int>(i * 37 % 255) - 127) * 0.25f;  // exact in all three
          const DeviceArray<std::uint8_t> raw = raw_bytes(values, raw_type);
          const std::vector<float> mean = random_floats(columns, 1), scale = random_floats(columns, 2);
          const DeviceArray<float> device_mean(mean), device_scale(scale);
          const DeviceArray<std::int32_t> flag(std::vector<std::int32_t>{0});
          const TestMatrix out(std::vector<float>(rows * columns), rows, columns, type);
          normalise_rows(execution, {raw.data(), raw_type, rows, columns, columns}, device_mean.array(),
                         device_scale.array(), out.view(), flag.data());
          const std::vector<float> result = out.values();
          for (std::int64_t i = 0; i < rows * columns; ++i) {
            const double expected = (static_cast<double>(values[i]) - mean[i % columns]) * scale[i % columns];
            // A difference and a product in fp32, then the storage.
            const double error = 3 * kRoundoff * std::abs(expected);
            REQUIRE(std::abs(result[i] - expected) <=
                    error + (type == Scalar::bf16 ? kRoundoffBf16 * 1.001 * std::abs(expected) : 0));
          }
          CHECK(flag.values()[0] == 0);
        }
  });
}

TEST_CASE("a raw value that is not finite raises the flag and does not clear an earlier flag") {
  for_each_backend([&](const kernels::Execution& execution) {
    const std::int64_t rows = 5, columns = 300;
    const DeviceArray<float> mean(std::vector<float>(columns, 0.0f)), scale(std::vector<float>(columns, 1.0f));
    const TestMatrix out(std::vector<float>(rows * columns), rows, columns, Scalar::fp32);
    for (const Scalar type : {Scalar::fp32, Scalar::fp16, Scalar::bf16})
      for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
        for (const std::int64_t place : {std::int64_t{0}, rows * columns - 1}) {
          std::vector<float> values(rows * columns, 1.0f);
          const DeviceArray<std::uint8_t> good = raw_bytes(values, type);
          values[place] = bad;
          const DeviceArray<std::uint8_t> raw = raw_bytes(values, type);
          const DeviceArray<std::int32_t> flag(std::vector<std::int32_t>{0});
          normalise_rows(execution, {raw.data(), type, rows, columns, columns}, mean.array(), scale.array(), out.view(),
                         flag.data());
          CHECK(flag.values()[0] == 1);
          normalise_rows(execution, {good.data(), type, rows, columns, columns}, mean.array(), scale.array(),
                         out.view(), flag.data());
          CHECK(flag.values()[0] == 1);
        }
  });
}

TEST_CASE("copy_rows copies rows of every width between different strides") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const std::int64_t columns : {1, 5, 64, 770})
      for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
        const std::int64_t rows = 19, stride = columns + 8;
        const TestMatrix from(random_floats(rows * stride, 1), rows, stride, type),
            to(std::vector<float>(rows * columns, 3.0f), rows, columns, type);
        copy_rows(execution, from.view().columns_from(8, columns), to.view());
        const std::vector<float> in = from.values(), out = to.values();
        for (std::int64_t i = 0; i < rows * columns; ++i) REQUIRE(out[i] == in[i / columns * stride + 8 + i % columns]);
      }
  });
}

TEST_CASE("normalise_rows writes only the columns of a view into a wider matrix") {
  for_each_backend([&](const kernels::Execution& execution) {
    const std::int64_t rows = 4, columns = 5, stride = 11;
    const DeviceArray<float> raw(random_floats(rows * stride, 3)), mean(std::vector<float>(columns, 0.0f)),
        scale(std::vector<float>(columns, 2.0f));
    const DeviceArray<float> out(std::vector<float>(rows * stride, -1.0f));
    const DeviceArray<std::int32_t> flag(std::vector<std::int32_t>{0});
    const AnyMatrix raw_view{raw.data(), Scalar::fp32, rows, stride, stride},
        out_view{out.data(), Scalar::fp32, rows, stride, stride};
    normalise_rows(execution, raw_view.columns_from(2, columns), mean.array(), scale.array(),
                   out_view.columns_from(4, columns), flag.data());
    const std::vector<float> from = raw.values(), to = out.values();
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < stride; ++j) {
        const bool inside = j >= 4 && j < 4 + columns;
        REQUIRE(to[i * stride + j] == (inside ? 2.0f * from[i * stride + j - 2] : -1.0f));
      }
  });
}

}  // namespace weft::testing
