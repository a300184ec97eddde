// SPDX-License-Identifier: Apache-2.0
//
// Products of operands in 8 bits: C = A Bᵀ + beta C, with fp32 sums,
//
//   C_ij = s t sum over k of A_ik B_jk + beta C_ij
//
// A and B are matrices of codes, e4m3 or e5m2 (fp8_codes.hpp), with one scale each, s and t, which lie where the
// kernels run. Both are stored with the index of the sum last, as the matrix units of a GPU read them; who needs a
// matrix in a product over its rows as well codes it together with its transpose.
//
// Scales are powers of two that follow from a largest magnitude: of an earlier step, or of the matrix itself. The
// product with a power of two is exact, so a code is the value rounded once. Values beyond the largest code saturate.
// The largest magnitude is kept as the bits of an fp32 number, whose order as integers is that of the numbers, and of
// infinity and NaN above them: a maximum of integers, which any order of threads and ranks leaves the same.
//
// The product runs in cuBLASLt (compute capability 8.9); the portable backend multiplies the decoded operands in fp32,
// which differs by the rounding of sums.
#pragma once

#include <cstddef>
#include <string>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/gemm/fp8_codes.hpp"

namespace weft::kernels {

/// Sizes of a product in 8 bits, of operands and result, are multiples of this.
inline constexpr std::int64_t kCodedMultiple = 16;

/// Rows of a block of Coding::sums; the last one may have fewer.
inline constexpr std::int64_t kCodeRows = 128;

/// Scales in an array are this many elements apart: cuBLASLt reads scales at multiples of 16 bytes only.
inline constexpr std::int64_t kScaleStride = 4;

/// A matrix in codes: value(i, j) = codes(i, j) * *scale.
struct CodedMatrix {
  Matrix<const std::uint8_t> codes;
  CodeType type = CodeType::e4m3;
  const float* scale = nullptr;  ///< [1], at a multiple of 16 bytes
};

/// What is formed of a matrix [rows, columns].
struct Coding {
  CodeType type = CodeType::e4m3;
  Matrix<std::uint8_t> codes = {};       ///< [rows, columns], or without data
  Matrix<std::uint8_t> transposed = {};  ///< [columns, rows], or without data
  const float* scale = nullptr;          ///< [1], of form_scales
  std::int32_t* largest = nullptr;       ///< [1], raised to the largest magnitude; null: not wanted
  Matrix<float> sums = {};  ///< [blocks of kCodeRows rows, columns], sums of the elements of a block; or without data
};

/// Codes `from` (fp32, bf16 or fp16). Elements that are not finite become NaN.
WEFT_KERNEL(code_matrix, void(const Execution&, AnyMatrix from, const Coding&));

/// Raises *largest to the largest magnitude of `from`.
WEFT_KERNEL(largest_magnitude, void(const Execution&, AnyMatrix from, std::int32_t* largest));

/// scales[i * kScaleStride] = the scale for values up to the magnitude largest[i] (code_scale).
void form_scales(const Execution&, Array<const std::int32_t> largest, CodeType type, Array<float> scales);

/// kept[i] = largest[i] where that is finite and not 0; largest[i] = 0.
void keep_largest(const Execution&, Array<std::int32_t> largest, Array<std::int32_t> kept);

/// Bytes of workspace of a product of which C is [rows, columns] of this type.
WEFT_KERNEL(gemm_coded_workspace,
            std::int64_t(Backend, Scalar c, std::int64_t rows, std::int64_t columns, std::int64_t inner));

/// C = A Bᵀ + beta C. A [rows, inner], B [columns, inner], not both e5m2; C bf16, or fp32. fast: a GPU may keep sums
/// with fewer bits than fp32. Throws Error(internal) if sizes are no multiples of kCodedMultiple.
void gemm_coded(const Execution&, const CodedMatrix& a, const CodedMatrix& b, float beta, AnyMatrix c, bool fast,
                Array<std::byte> workspace);
/// Computes A Bᵀ plus a bias [columns], added before the sums are rounded; C in bf16, sums as with `fast`. False if the
/// dense library does not take it (on the portable backend it does not): nothing is enqueued then.
bool gemm_coded_with_bias(const Execution&, const CodedMatrix& a, const CodedMatrix& b, Array<const bf16> bias,
                          AnyMatrix c, Array<std::byte> workspace);

/// Why this GPU has no products in 8 bits; "" if it has, and on the portable backend.
WEFT_KERNEL(coded_obstacle, std::string(Backend));

}  // namespace weft::kernels
