// SPDX-License-Identifier: Apache-2.0
//
// What surrounds the dense library on both backends: operands in types that it does not take.
#include <string>

#include "base/error.hpp"
#include "kernels/bf16.hpp"
#include "kernels/gemm/dense_library.hpp"
#include "kernels/gemm/row_product.hpp"
#include "kernels/portable.hpp"
#include "kernels/workspace.hpp"

namespace weft::kernels {
namespace {

/// fp32 copies of what the library does not take; null where it does.
struct Pieces {
  float *a = nullptr, *b = nullptr, *c = nullptr;
  std::byte* library = nullptr;
  std::int64_t bytes = 0;
};

Pieces place(std::byte* data, Scalar a, Scalar b, Scalar c, std::int64_t rows, std::int64_t columns,
             std::int64_t inner) {
  kernels::Workspace layout(data);
  Pieces pieces;
  const bool native = dense_library::takes(a, b, c);
  // Two operands that the library takes only with another result type stay as they are; their sums are fp32.
  const bool operands = native || dense_library::takes(a, b, Scalar::fp32);
  if (!operands && a != Scalar::fp32) pieces.a = layout.take<float>(rows * inner).data;
  if (!operands && b != Scalar::fp32) pieces.b = layout.take<float>(inner * columns).data;
  if (!native && c != Scalar::fp32) pieces.c = layout.take<float>(rows * columns).data;
  pieces.library = layout.take<std::byte>(dense_library::workspace_bytes()).data;
  pieces.bytes = layout.bytes();
  return pieces;
}

/// The matrix without gaps between rows, as fp32 in `data`.
AnyMatrix in_fp32(float* data, const AnyMatrix& matrix) {
  return {data, Scalar::fp32, matrix.rows, matrix.columns, matrix.columns};
}

template <class From, class To>
void convert_as(const Execution& execution, const AnyMatrix& from, const AnyMatrix& to) {
  const Matrix<const From> source{static_cast<const From*>(from.data), from.rows, from.columns, from.stride};
  const Matrix<To> target{static_cast<To*>(to.data), to.rows, to.columns, to.stride};
  for_teams(
      execution, "gemm: convert", source.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const From* in = source.row(team.league_rank());
        To* out = target.row(team.league_rank());
        for_columns(team, static_cast<int>(source.columns),
                    [&](int c) { out[c] = from_float<To>(static_cast<float>(in[c])); });
      });
}

void widen(const Execution& execution, const AnyMatrix& from, const AnyMatrix& to) {
  if (from.type == Scalar::bf16)
    convert_as<bf16, float>(execution, from, to);
  else
    convert_as<half, float>(execution, from, to);
}

void narrow(const Execution& execution, const AnyMatrix& from, const AnyMatrix& to) {
  if (to.type == Scalar::bf16)
    convert_as<float, bf16>(execution, from, to);
  else
    convert_as<float, half>(execution, from, to);
}

/// C = beta * C: a product over no terms.
template <class T>
void scale_as(const Execution& execution, float beta, const AnyMatrix& c) {
  const Matrix<T> matrix{static_cast<T*>(c.data), c.rows, c.columns, c.stride};
  for_all(
      execution, "gemm: scale", c.rows * c.columns, KOKKOS_LAMBDA(std::int64_t i) {
        T& element = matrix(i / matrix.columns, i % matrix.columns);
        element = from_float<T>(beta == 0.0f ? 0.0f : beta * static_cast<float>(element));
      });
}

void scale(const Execution& execution, float beta, const AnyMatrix& c) {
  if (c.type == Scalar::fp32)
    scale_as<float>(execution, beta, c);
  else if (c.type == Scalar::bf16)
    scale_as<bf16>(execution, beta, c);
  else
    scale_as<half>(execution, beta, c);
}

/// The product by `multiply`, of operands in types that it takes.
void gemm_with(decltype(dense_library::multiply) multiply, const Execution& execution, float alpha, AnyMatrix a,
               Form a_form, AnyMatrix b, Form b_form, float beta, AnyMatrix c, Array<std::byte> workspace) {
  if (c.rows == 0 || c.columns == 0) return;
  const std::int64_t inner = a_form == Form::plain ? a.columns : a.rows;
  if (inner == 0) return scale(execution, beta, c);
  const Pieces pieces = place(workspace.data, a.type, b.type, c.type, c.rows, c.columns, inner);
  if (pieces.bytes > workspace.size)
    throw Error(ExitCode::internal, "gemm: the workspace has " + std::to_string(workspace.size) + " bytes (" +
                                        std::to_string(pieces.bytes) + " are needed; see gemm_workspace)");
  const auto widened = [&](const AnyMatrix& matrix, float* data, bool needed) {
    const AnyMatrix wide = in_fp32(data, matrix);
    if (needed) widen(execution, matrix, wide);
    return wide;
  };
  if (pieces.a != nullptr) a = widened(a, pieces.a, true);
  if (pieces.b != nullptr) b = widened(b, pieces.b, true);
  const AnyMatrix sums = pieces.c != nullptr ? widened(c, pieces.c, beta != 0.0f) : c;
  multiply(execution, alpha, a, a_form, b, b_form, beta, sums, {pieces.library, dense_library::workspace_bytes()});
  if (pieces.c != nullptr) narrow(execution, sums, c);
}

}  // namespace

std::int64_t gemm_workspace(Scalar a, Scalar b, Scalar c, std::int64_t rows, std::int64_t columns, std::int64_t inner) {
  return place(nullptr, a, b, c, rows, columns, inner).bytes;
}

void gemm(const Execution& execution, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, float beta,
          AnyMatrix c, Array<std::byte> workspace) {
  gemm_with(dense_library::multiply, execution, alpha, a, a_form, b, b_form, beta, c, workspace);
}

void gemm_by_row(const Execution& execution, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form,
                 float beta, AnyMatrix c, Array<std::byte> workspace) {
  if (a_form != Form::plain || a.type != Scalar::fp32 || c.type != Scalar::fp32)
    throw Error(ExitCode::internal, "gemm_by_row: A is not plain, or A or C is not fp32");
  gemm_with(multiply_by_row, execution, alpha, a, a_form, b, b_form, beta, c, workspace);
}

void gemm_batched(const Execution& execution, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form,
                  float beta, AnyMatrix c, const Batch& batch, Array<std::byte> workspace) {
  const std::int64_t inner = a_form == Form::plain ? a.columns : a.rows;
  if (batch.count > 1 && c.rows > 0 && c.columns > 0 && inner > 0 && dense_library::takes(a.type, b.type, c.type)) {
    const Pieces pieces = place(workspace.data, a.type, b.type, c.type, c.rows, c.columns, inner);
    const std::int64_t bytes = dense_library::workspace_bytes();
    if (pieces.bytes <= workspace.size && dense_library::multiply_batched(execution, alpha, a, a_form, b, b_form, beta,
                                                                          c, batch, {pieces.library, bytes}))
      return;
  }
  const auto at = [](AnyMatrix matrix, std::int64_t elements) {
    matrix.data = static_cast<char*>(matrix.data) + elements * bytes_of(matrix.type);
    return matrix;
  };
  for (std::int64_t i = 0; i < batch.count; ++i)
    gemm(execution, alpha, at(a, i * batch.a), a_form, at(b, i * batch.b), b_form, beta, at(c, i * batch.c), workspace);
}

bool gemm_with_epilogue(const Execution& execution, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, AnyMatrix c,
                        const Epilogue& epilogue, Array<std::byte> workspace) {
  if (c.rows == 0 || c.columns == 0 || (a_form == Form::plain ? a.columns : a.rows) == 0) return false;
  return dense_library::multiply_with_epilogue(execution, a, a_form, b, b_form, c, epilogue, workspace);
}

}  // namespace weft::kernels
