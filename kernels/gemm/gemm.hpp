// SPDX-License-Identifier: Apache-2.0
//
// Dense matrix product, row-major:
//
//   C = alpha * op(A) * op(B) + beta * C        op(A) [rows, inner], op(B) [inner, columns], C [rows, columns]
//
// A, B and C are fp32, bf16 or fp16, each on its own; sums are fp32 and rounded once. Execution::tf32 lets a GPU round
// fp32 operands to TF32. Products run in the
// dense library of the build: OpenBLAS on the host, cuBLASLt on a GPU (for both backends). Operands that the library
// does not take are widened to fp32 in the workspace, which is exact.
//
// Invariant. The algorithm depends on shapes, types and alignment alone, and parts of a sum over `inner` are added in a
// fixed order: equal calls of one build on one machine type give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// How an operand is stored: as it enters the product, or transposed.
enum class Form : int { plain, transposed };

/// Bytes of workspace of `gemm`.
std::int64_t gemm_workspace(Scalar a, Scalar b, Scalar c, std::int64_t rows, std::int64_t columns, std::int64_t inner);

/// beta == 0 overwrites C without reading it. The workspace (aligned to 256 bytes) is free again when the product is
/// done. Throws Error(internal) if the workspace is too small or the library fails.
void gemm(const Execution&, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, float beta, AnyMatrix c,
          Array<std::byte> workspace);

/// gemm, with A plain and A and C in fp32, by a kernel of its own (gemm_by_row_portable.cpp): each sum is one chain of
/// fused operations in the order of the inner index, so the bits of a row of C depend on the same row of A and on B
/// alone, not on the number of rows.
void gemm_by_row(const Execution&, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, float beta,
                 AnyMatrix c, Array<std::byte> workspace);

/// Products of equal shape, whose matrices lie at equal distances (in elements) from one another.
struct Batch {
  std::int64_t count = 1;
  std::int64_t a = 0, b = 0, c = 0;

  bool operator==(const Batch&) const = default;
};

/// `batch.count` products as by `gemm`, of which a, b and c are the first. The workspace is that of one product. On a
/// GPU one call of the library, if it takes the types.
void gemm_batched(const Execution&, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, float beta,
                  AnyMatrix c, const Batch& batch, Array<std::byte> workspace);

/// What the dense library does with the sums of a product before it stores them. Vectors and matrices are of C's type.
struct Epilogue {
  enum class Kind : int {
    none,
    bias,           ///< C = sums + bias
    bias_gelu,      ///< C = gelu(sums + bias): the tanh form
    gelu_gradient,  ///< C = sums * gelu'(hidden): the tanh form
  } kind = Kind::none;
  const void* bias = nullptr;  ///< [columns]
  AnyMatrix hidden = {};       ///< [rows, columns]; another than C
};

/// gemm with alpha = 1, beta = 0 and an epilogue. False if the dense library does not take it (on the host it takes
/// none): nothing is enqueued then, and the caller forms the product and the rest by separate kernels. Whether it does
/// depends on shapes, types and alignment alone.
bool gemm_with_epilogue(const Execution&, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, AnyMatrix c,
                        const Epilogue&, Array<std::byte> workspace);

}  // namespace weft::kernels
