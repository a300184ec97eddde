// SPDX-License-Identifier: Apache-2.0
//
// Gradients of parameters from the rows that an operation of a backward pass leaves: its inputs X [n, in] and the
// gradients of its outputs G [n, out], fp32, bf16 or fp16. The gradient of a matrix, Gᵀ X, is a call of gemm/gemm.hpp.
//
// All functions add to fp32 arrays, so that micro-batches accumulate; vectors may be overwritten instead. Sums are fp32
// in two stages: over blocks of fixed size, then over the blocks. Their order depends on the shapes and ids alone,
// never on the number of threads. No atomics on floats.
#pragma once

#include <cstddef>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/gradient/row_sums.hpp"

namespace weft::kernels {

/// Bytes of workspace of add_column_sums and add_column_products: the sums of the blocks.
constexpr std::int64_t column_sums_workspace(std::int64_t rows, std::int64_t columns) {
  return row_sums(rows) * columns * static_cast<std::int64_t>(sizeof(float));
}

/// out[j] += sum over n of g[n, j]: a bias. `overwrite`: = instead of +=, out is not read.
void add_column_sums(const Execution&, AnyMatrix g, Array<float> out, bool overwrite, Array<std::byte> workspace);

/// out[j] += sum over n of (x[n, j] - shift[n]) * scale[n] * g[n, j]: the gain of a normalisation, whose statistics of
/// the rows are shift and scale. Without data: 0 and 1. `overwrite`: as above.
void add_column_products(const Execution&, AnyMatrix x, AnyMatrix g, Array<const float> shift, Array<const float> scale,
                         Array<float> out, bool overwrite, Array<std::byte> workspace);

/// Bytes of workspace of add_rows_by_id for n ids and a table of `columns` columns.
std::int64_t rows_by_id_workspace(std::int64_t n, std::int64_t columns);

/// out[ids[n] - first_row] += g[n] for all n in ascending order: an embedding. Ids outside the rows of `out` belong to
/// other ranks and are skipped. Sorts the ids, then sums runs of equal ones. n below 2^31.
void add_rows_by_id(const Execution&, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                    Matrix<float> out, Array<std::byte> workspace);

}  // namespace weft::kernels
