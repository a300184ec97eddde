// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/fp8.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/portable.hpp"
#include "kernels/workspace.hpp"

namespace weft::kernels {
namespace portable {
namespace {

/// fp32 copies of both operands, and what their product needs.
struct Decoded {
  Array<float> a, b;
  Array<std::byte> product;
  std::int64_t bytes;

  Decoded(std::byte* memory, Scalar type, std::int64_t rows, std::int64_t columns, std::int64_t inner) {
    Workspace layout(memory);
    a = layout.take<float>(rows * inner);
    b = layout.take<float>(columns * inner);
    product = layout.take<std::byte>(gemm_workspace(Scalar::fp32, Scalar::fp32, type, rows, columns, inner));
    bytes = layout.bytes();
  }
};

void decode(const Execution& execution, const CodedMatrix& from, Array<float> to) {
  const CodedMatrix source = from;
  for_all(
      execution, "fp8: decode", to.size, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t columns = source.codes.columns;
        to[i] = value_of_code(source.type, source.codes(i / columns, i % columns)) * *source.scale;
      });
}

KOKKOS_FORCEINLINE_FUNCTION float element(const AnyMatrix& matrix, std::int64_t row, std::int64_t column) {
  const std::int64_t at = row * matrix.stride + column;
  if (matrix.type == Scalar::fp32) return static_cast<const float*>(matrix.data)[at];
  if (matrix.type == Scalar::bf16) return static_cast<const bf16*>(matrix.data)[at];
  return static_cast<const half*>(matrix.data)[at];
}

/// Runs body(row, column, value) on each element, those of a tile in one call, and raises *largest, if it is not null,
/// once per tile.
template <class Body>
void for_tiles(const Execution& execution, const char* name, const AnyMatrix& from, std::int32_t* largest,
               const Body& body) {
  constexpr std::int64_t kTile = 32;
  const AnyMatrix source = from;
  const std::int64_t across = (from.columns + kTile - 1) / kTile, down = (from.rows + kTile - 1) / kTile;
  for_all(
      execution, name, across * down, KOKKOS_LAMBDA(std::int64_t tile) {
        const std::int64_t first_row = tile / across * kTile, first_column = tile % across * kTile;
        std::int32_t most = 0;
        for (std::int64_t row = first_row; row < first_row + kTile && row < source.rows; ++row)
          for (std::int64_t column = first_column; column < first_column + kTile && column < source.columns; ++column) {
            const float value = element(source, row, column);
            const std::int32_t bits = magnitude_bits(value);
            most = bits > most ? bits : most;
            body(row, column, value);
          }
        if (largest != nullptr) Kokkos::atomic_max(largest, most);
      });
}

}  // namespace

void code_matrix(const Execution& execution, AnyMatrix from, const Coding& coding) {
  const Coding to = coding;
  for_tiles(
      execution, "fp8: code", from, to.largest, KOKKOS_LAMBDA(std::int64_t row, std::int64_t column, float value) {
        const bool finite = magnitude_bits(value) < kInfinityBits;
        const float scaled = finite ? value * (1.0f / *to.scale) : bits_float(0x7fc00000u);
        const std::uint8_t code = code_of_value(to.type, scaled);
        if (to.codes.data != nullptr) to.codes(row, column) = code;
        if (to.transposed.data != nullptr) to.transposed(column, row) = code;
      });
  if (to.sums.data == nullptr) return;
  const AnyMatrix source = from;
  for_all(
      execution, "fp8: sums", to.sums.rows * from.columns, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t begin = i / source.columns * kCodeRows, column = i % source.columns;
        float sum = 0.0f;
        for (std::int64_t row = begin; row < begin + kCodeRows && row < source.rows; ++row)
          sum += element(source, row, column);
        to.sums(i / source.columns, column) = sum;
      });
}

void largest_magnitude(const Execution& execution, AnyMatrix from, std::int32_t* largest) {
  for_tiles(execution, "fp8: largest", from, largest, KOKKOS_LAMBDA(std::int64_t, std::int64_t, float){});
}

std::int64_t gemm_coded_workspace(Backend, Scalar c, std::int64_t rows, std::int64_t columns, std::int64_t inner) {
  return Decoded(nullptr, c, rows, columns, inner).bytes;
}

void gemm_coded(const Execution& execution, const CodedMatrix& a, const CodedMatrix& b, float beta, AnyMatrix c, bool,
                Array<std::byte> workspace) {
  const std::int64_t inner = a.codes.columns;
  const Decoded decoded(workspace.data, c.type, c.rows, c.columns, inner);
  decode(execution, a, decoded.a);
  decode(execution, b, decoded.b);
  gemm(execution, 1.0f, {decoded.a.data, Scalar::fp32, c.rows, inner, inner}, Form::plain,
       {decoded.b.data, Scalar::fp32, c.columns, inner, inner}, Form::transposed, beta, c, decoded.product);
}

bool gemm_coded_with_bias(const Execution&, const CodedMatrix&, const CodedMatrix&, Array<const bf16>, AnyMatrix,
                          Array<std::byte>) {
  return false;
}

std::string coded_obstacle(Backend) { return ""; }

}  // namespace portable

void form_scales(const Execution& execution, Array<const std::int32_t> largest, CodeType type, Array<float> scales) {
  for_all(
      execution, "fp8: scales", largest.size,
      KOKKOS_LAMBDA(std::int64_t i) { scales[i * kScaleStride] = code_scale(largest[i], type); });
}

void keep_largest(const Execution& execution, Array<std::int32_t> largest, Array<std::int32_t> kept) {
  for_all(
      execution, "fp8: keep", kept.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (largest[i] > 0 && largest[i] < kInfinityBits) kept[i] = largest[i];
        largest[i] = 0;
      });
}

}  // namespace weft::kernels
