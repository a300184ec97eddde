// SPDX-License-Identifier: Apache-2.0
//
// Products of operands in 8 bits: y = x W^T with x and W rounded to e4m3 codes (optimize/codec.hpp), one fp32 scale per
// row of each, fp32 sums:
//
//   y_ij = s_i t_j sum over k of X_ik W_jk        s_i = max |x_ik| over k / 448, t_j likewise
//
// The scales follow from the rows as they are (no history): the result depends neither on earlier steps nor on the
// division of a batch into micro-batches. Rounding errs by at most 2^-4 of an element, and by 2^-10 s_i below 2^-6 s_i.
//
// The product runs in cuBLASLt (compute capability 9.0, 16-byte rows); the portable backend multiplies the decoded
// operands in fp32, which differs by the rounding of sums.
#pragma once

#include <cstddef>
#include <string>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/gemm/gemm.hpp"

namespace weft::kernels {

/// Columns of a product in 8 bits, of operands and result, are multiples of this.
inline constexpr std::int64_t kCodedColumns = 16;

/// A matrix in codes: value(i, j) = codes(i, j) * scales[i].
struct CodedRows {
  Matrix<std::uint8_t> codes;  ///< [rows, columns] without gaps
  Array<float> scales;         ///< [rows]
};

/// Bytes of a matrix in codes.
std::int64_t coded_bytes(std::int64_t rows, std::int64_t columns);
/// The matrix in that memory (aligned to 256 bytes).
CodedRows coded_rows(Array<std::byte> memory, std::int64_t rows, std::int64_t columns);

/// Rounds rows; with Form::transposed those of the transpose: row i of `to` is column i of `from`. fp32, bf16 or fp16.
/// Elements that are not finite become NaN.
WEFT_KERNEL(code_rows, void(const Execution&, AnyMatrix from, Form form, const CodedRows& to));

WEFT_KERNEL(gemm_coded_workspace, std::int64_t(Backend, std::int64_t rows, std::int64_t columns, std::int64_t inner));

/// y [rows, columns] = x [rows, inner] times the transpose of weight [columns, inner]; y is bf16. Throws
/// Error(internal) if columns are no multiples of kCodedColumns.
void gemm_coded(const Execution&, const CodedRows& x, const CodedRows& weight, AnyMatrix y, Array<std::byte> workspace);
/// Computes `gemm_coded` plus a bias [columns], added before the sums are rounded. False if the dense library does not
/// take it (on the portable backend it does not): nothing is enqueued then.
bool gemm_coded_with_bias(const Execution&, const CodedRows& x, const CodedRows& weight, Array<const bf16> bias,
                          AnyMatrix y, Array<std::byte> workspace);

/// Why this GPU has no products in 8 bits; "" if it has, and on the portable backend.
WEFT_KERNEL(coded_obstacle, std::string(Backend));

}  // namespace weft::kernels
