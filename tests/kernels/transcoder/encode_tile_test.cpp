// SPDX-License-Identifier: Apache-2.0
#include "kernels/transcoder/encode/encode_tile.hpp"

#include <cmath>
#include <vector>

#include "device/memory.hpp"
#include "kernels/bf16.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/random.hpp"
#include "tests/kernels/support.hpp"

namespace weft::kernels {
namespace {

using testing::for_each_backend;

/// [rows, columns] numbers in (-1, 1), rounded to the type, with `gap` more elements between rows, on the device.
struct Input {
  Scalar type;
  std::int64_t rows, columns, stride;
  std::vector<float> value;  // without the gaps
  device::Buffer<std::byte> memory;

  Input(Scalar type_, std::int64_t rows_, std::int64_t columns_, std::int64_t gap, std::uint64_t seed)
      : type(type_), rows(rows_), columns(columns_), stride(columns_ + gap), memory(rows_ * stride * bytes_of(type_)) {
    std::vector<float> wide(static_cast<std::size_t>(rows * stride), std::nanf(""));
    std::vector<bf16> narrow(wide.size());
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) {
        float v =
            2 * uniform_float(philox(seed, Purpose::test, 0, static_cast<std::uint64_t>(i * columns + j)).word[0]) - 1;
        if (type == Scalar::bf16) v = to_bf16(v);
        value.push_back(v);
        wide[static_cast<std::size_t>(i * stride + j)] = v;
      }
    for (std::size_t i = 0; i < wide.size(); ++i) narrow[i] = to_bf16(wide[i]);
    device::copy(testing::execution(), memory.data(),
                 type == Scalar::bf16 ? static_cast<const void*>(narrow.data()) : wide.data(), memory.bytes(),
                 device::Direction::to_device);
    fence(testing::execution());
  }
  AnyMatrix matrix() const { return {memory.data(), type, rows, columns, stride}; }
};

struct Shape {
  std::int64_t n, f, d, row_begin,
      n_rows;  // tokens, features of the encoder, width, part of the features that the tile has
};

/// The largest |product - expected| in units of what rounding allows.
double largest_excess(const Execution& execution, const Shape& shape, Scalar x_type, StorageType storage,
                      Scalar product_type) {
  const Input x(x_type, shape.n, shape.d, 5, 1);
  const bool planes = storage == StorageType::fp32 && execution.backend == Backend::cuda;
  const Input w(storage == StorageType::fp32 && !planes ? Scalar::fp32 : Scalar::bf16, shape.f, shape.d, 0, 2);
  ParameterRows encoder;
  encoder.storage = storage;
  encoder.rows = shape.f;
  encoder.columns = encoder.segment = shape.d;
  encoder.weight = w.memory.data();
  if (planes) encoder.weight_rest = reinterpret_cast<std::int16_t*>(w.memory.data());  // not read
  const std::int64_t stride = shape.n_rows + 3;
  device::Buffer<std::byte> product(shape.n * stride * bytes_of(product_type));
  const device::Buffer<std::byte> workspace(
      encode_workspace(execution.backend, shape.n, shape.n_rows, shape.d, x_type, storage, product_type));
  const AnyMatrix out{product.data(), product_type, shape.n, shape.n_rows, stride};
  encode_tile(execution, x.matrix(), encoder, shape.row_begin, out, workspace.array());
  std::vector<std::byte> host(static_cast<std::size_t>(product.bytes()));
  device::copy(testing::execution(), host.data(), product.data(), product.bytes(), device::Direction::to_host);
  fence(testing::execution());

  double worst = 0;
  for (std::int64_t n = 0; n < shape.n; ++n)
    for (std::int64_t f = 0; f < shape.n_rows; ++f) {
      double sum = 0, absolute = 0;
      for (std::int64_t k = 0; k < shape.d; ++k) {
        const double term = static_cast<double>(x.value[static_cast<std::size_t>(n * shape.d + k)]) *
                            w.value[static_cast<std::size_t>((shape.row_begin + f) * shape.d + k)];
        sum += term;
        absolute += std::fabs(term);
      }
      const std::size_t at = static_cast<std::size_t>(n * stride + f);
      const double value = product_type == Scalar::bf16
                               ? static_cast<float>(reinterpret_cast<const bf16*>(host.data())[at])
                               : reinterpret_cast<const float*>(host.data())[at];
      // d products summed in fp32 in any order: error at most d * 2^-24 of the sum of magnitudes; storing as bf16 (8
      // bits of precision) adds half a unit in the last place, at most 2^-8 of the value.
      const double fp32 = static_cast<double>(shape.d) * 0x1p-24 * absolute;
      const double allowed = fp32 + (product_type == Scalar::bf16 ? 0x1p-8 * (std::fabs(sum) + fp32) : 0);
      worst = std::max(worst, std::isnan(value) ? 1e30 : std::fabs(value - sum) / allowed);
    }
  return worst;
}

}  // namespace

TEST_CASE("encode_tile agrees with sums in float64 for every shape and type") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape shape : {Shape{1, 1, 1, 0, 1},
                              {7, 1000, 770, 0, 1000},
                              {1, 300, 770, 17, 200},
                              {4097, 9, 33, 2, 5},
                              {64, 64, 64, 0, 64}})
      for (const Scalar x : {Scalar::fp32, Scalar::bf16})
        for (const StorageType storage : {StorageType::fp32, StorageType::bf16, StorageType::eight_bit})
          for (const Scalar product : {Scalar::fp32, Scalar::bf16}) {
            // Refused: only the bf16 plane of fp32 weights would enter a product of fp32 inputs.
            if (execution.backend == Backend::cuda && storage == StorageType::fp32 && x == Scalar::fp32) continue;
            INFO("n ", shape.n, " f ", shape.n_rows, " d ", shape.d, " types ", static_cast<int>(x),
                 static_cast<int>(storage), static_cast<int>(product));
            CHECK(largest_excess(execution, shape, x, storage, product) <= 1);
          }
  });
}

TEST_CASE("an empty tile does nothing") {
  for_each_backend([&](const kernels::Execution& execution) {
    ParameterRows encoder;
    encoder.columns = 4;
    encode_tile(execution, {nullptr, Scalar::fp32, 0, 4, 4}, encoder, 0, {nullptr, Scalar::fp32, 0, 0, 0}, {});
  });
}

}  // namespace weft::kernels
