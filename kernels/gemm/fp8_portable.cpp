// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/fp8.hpp"
#include "kernels/optimize/codec.hpp"
#include "kernels/portable.hpp"
#include "kernels/workspace.hpp"

namespace weft::kernels::portable {
namespace {

struct CodeScratch {
  float values[kChunkColumns];
};

/// fp32 copies of both operands, and what their product needs.
struct Decoded {
  Array<float> x, weight;
  Array<std::byte> product;
  std::int64_t bytes;

  Decoded(std::byte* memory, std::int64_t rows, std::int64_t columns, std::int64_t inner) {
    Workspace layout(memory);
    x = layout.take<float>(rows * inner);
    weight = layout.take<float>(columns * inner);
    product = layout.take<std::byte>(gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::bf16, rows, columns, inner));
    bytes = layout.bytes();
  }
};

void decode(const Execution& execution, const CodedRows& from, Array<float> to) {
  const CodedRows rows = from;
  for_all(
      execution, "fp8: decode", to.size, KOKKOS_LAMBDA(std::int64_t i) {
        to[i] = code_to_float(rows.codes.data[i]) * rows.scales[i / rows.codes.columns];
      });
}

/// Magnitudes as integers: their order is that of the numbers, and of infinity and NaN above them.
KOKKOS_FORCEINLINE_FUNCTION std::uint32_t magnitude(float value) { return float_bits(value) & 0x7fffffffu; }

KOKKOS_FORCEINLINE_FUNCTION float element(const AnyMatrix& matrix, std::int64_t row, std::int64_t column) {
  const std::int64_t at = row * matrix.stride + column;
  if (matrix.type == Scalar::fp32) return static_cast<const float*>(matrix.data)[at];
  if (matrix.type == Scalar::bf16) return static_cast<const bf16*>(matrix.data)[at];
  return static_cast<const half*>(matrix.data)[at];
}

/// Columns of `from` in blocks of rows, so that there is work for many threads: the largest magnitudes first, which are
/// merged by integer maxima.
void code_columns(const Execution& execution, const AnyMatrix& from, const CodedRows& to) {
  constexpr std::int64_t kRows = 16;
  const std::int64_t columns = from.columns, blocks = (from.rows + kRows - 1) / kRows;
  const AnyMatrix source = from;
  const CodedRows target = to;
  auto* const largest = reinterpret_cast<std::uint32_t*>(to.scales.data);
  for_all(
      execution, "fp8: clear", columns, KOKKOS_LAMBDA(std::int64_t j) { largest[j] = 0; });
  for_all(
      execution, "fp8: largest", blocks * columns, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t begin = i / columns * kRows, j = i % columns;
        std::uint32_t most = 0;
        for (std::int64_t row = begin; row < begin + kRows && row < source.rows; ++row) {
          const std::uint32_t here = magnitude(element(source, row, j));
          most = here > most ? here : most;
        }
        Kokkos::atomic_max(largest + j, most);
      });
  for_all(
      execution, "fp8: code", blocks * columns, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t begin = i / columns * kRows, j = i % columns;
        const float inverse = inverse_scale(block_scale(bits_float(largest[j])));
        for (std::int64_t row = begin; row < begin + kRows && row < source.rows; ++row)
          target.codes(j, row) = code_nearest(element(source, row, j) * inverse);
      });
  for_all(
      execution, "fp8: scales", columns,
      KOKKOS_LAMBDA(std::int64_t j) { target.scales[j] = block_scale(bits_float(largest[j])); });
}

}  // namespace

void code_rows(const Execution& execution, AnyMatrix from, Form form, const CodedRows& to) {
  if (form == Form::transposed) return code_columns(execution, from, to);
  const CodedRows target = to;
  for_teams(
      execution, "fp8: code rows", from.rows, sizeof(CodeScratch), KOKKOS_LAMBDA(const Team& team) {
        CodeScratch& buffer = scratch<CodeScratch>(team);
        const std::int64_t row = team.league_rank();
        float largest = 0.0f;
        int bad = 0;
        for_chunks(from.columns, from.columns, [&](std::int64_t column, int count) {
          const float* x = row_chunk(team, from, row, column, count, buffer.values);
          largest = max_columns(team, count, largest, [&](int c) { return bits_float(magnitude(x[c])); });
          bad += sum_columns<int>(team, count, [&](int c) { return is_finite(x[c]) ? 0 : 1; });
        });
        // A row with an element that is not finite is NaN in the product, whatever its other elements are.
        const float scale = bad == 0 ? block_scale(largest) : bits_float(0x7fc00000u);
        const float inverse = inverse_scale(scale);
        for_chunks(from.columns, from.columns, [&](std::int64_t column, int count) {
          const float* x = row_chunk(team, from, row, column, count, buffer.values);
          std::uint8_t* codes = target.codes.row(row) + column;
          for_columns(team, count, [&](int c) { codes[c] = code_nearest(x[c] * inverse); });
        });
        once(team, [&] { target.scales[row] = scale; });
      });
}

std::int64_t gemm_coded_workspace(Backend, std::int64_t rows, std::int64_t columns, std::int64_t inner) {
  return Decoded(nullptr, rows, columns, inner).bytes;
}

void gemm_coded(const Execution& execution, const CodedRows& x, const CodedRows& weight, AnyMatrix y,
                Array<std::byte> workspace) {
  const std::int64_t inner = x.codes.columns;
  const Decoded decoded(workspace.data, y.rows, y.columns, inner);
  decode(execution, x, decoded.x);
  decode(execution, weight, decoded.weight);
  gemm(execution, 1.0f, {decoded.x.data, Scalar::fp32, y.rows, inner, inner}, Form::plain,
       {decoded.weight.data, Scalar::fp32, y.columns, inner, inner}, Form::transposed, 0.0f, y, decoded.product);
}

bool gemm_coded_with_bias(const Execution&, const CodedRows&, const CodedRows&, Array<const bf16>, AnyMatrix,
                          Array<std::byte>) {
  return false;
}

std::string coded_obstacle(Backend) { return ""; }

}  // namespace weft::kernels::portable
