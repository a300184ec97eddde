// SPDX-License-Identifier: Apache-2.0
//
// Gradients of parameters from the rows that an operation of a backward pass leaves: its inputs X [n, in] and the
// gradients of its outputs G [n, out], fp32 or bf16. The gradient of a matrix, Gᵀ X, is a call of gemm/gemm.hpp.
//
// All functions add to fp32 arrays, so that micro-batches accumulate. Sums are fp32; their order depends on the shapes
// alone, never on the number of threads. No atomics.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// out[j] += sum over n of g[n, j]: a bias.
void add_column_sums(const Execution&, AnyMatrix g, Array<float> out);

/// out[j] += sum over n of x[n, j] * g[n, j]: the gain of a normalisation.
void add_column_products(const Execution&, AnyMatrix x, AnyMatrix g, Array<float> out);

/// out[ids[n] - first_row] += g[n] for all n in ascending order: an embedding. Ids outside the rows of `out` belong to
/// other ranks and are skipped. Compares every pair of ids: n^2 / 2 integer operations.
void add_rows_by_id(const Execution&, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                    Matrix<float> out);

}  // namespace weft::kernels
