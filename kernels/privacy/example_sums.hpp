// SPDX-License-Identifier: Apache-2.0
//
// Shared by the kernels of private training: sums per example of what was formed for each example.
#pragma once

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

/// AnyMatrix of a matrix that is only read.
inline AnyMatrix any_matrix(Matrix<const float> matrix) {
  return {const_cast<float*>(matrix.data), Scalar::fp32, matrix.rows, matrix.columns, matrix.stride};
}
inline AnyMatrix any_matrix(Matrix<const bf16> matrix) {
  return {const_cast<bf16*>(matrix.data), Scalar::bf16, matrix.rows, matrix.columns, matrix.stride};
}

/// Number of values of one partial sum.
constexpr std::int64_t kSquareBlock = 4096;
constexpr std::int64_t square_parts(std::int64_t size) { return (size + kSquareBlock - 1) / kSquareBlock; }

/// norms[b] += weight * sum over the n_parts values of b, in a fixed order.
WEFT_KERNEL(add_parts, void(const Execution&, std::int64_t n_parts, double weight, Array<double> norms,
                            Array<const double> parts));

/// norms[b] += sum of the squares of row b of `values`, fp32 or bf16, in fp64. parts: [rows * square_parts(columns)].
WEFT_KERNEL(add_squares, void(const Execution&, AnyMatrix values, Array<double> norms, Array<double> parts));

/// out[i / columns, i % columns] += sum over b of factors[b] * values[b, i], in order, without those of factor 0.
/// values: fp32 or bf16.
WEFT_KERNEL(add_weighed, void(const Execution&, AnyMatrix values, Array<const float> factors, Matrix<float> out));

/// norms[b] += weight * sum over i of at_most(a[b, i] * b[b, i], error), in fp64: a tile of a Gram sum. parts: as
/// above.
WEFT_KERNEL(add_inner_products, void(const Execution&, Matrix<const float> a, Matrix<const float> b, double weight,
                                     double error, Array<double> norms, Array<double> parts));

/// Upper bound of a value with the given error.
WEFT_HOST_DEVICE inline double at_most(double value, double error) {
  return value + error * (value < 0 ? -value : value);
}

/// norms[e] += weight * sum over the rows t of example e of values[t - first], in their order.
void add_row_values(const Execution&, Array<const double> values, Array<const std::int64_t> offsets, std::int64_t first,
                    double weight, Array<double> norms);

/// norms[e] += |G_eᵀ X_e|^2 of the examples of at most `most_rows` rows, from the products of each two of their rows.
void add_pairwise_norms(const Execution&, AnyMatrix x, AnyMatrix g, Array<const std::int64_t> offsets,
                        std::int64_t most_rows, Array<double> norms);

/// to[i] = c * from[first + i], or where `exact` 1 * it, in fp32; 0 where c is 0, and for rows outside all examples.
void weigh_rows(const Execution&, AnyMatrix from, std::int64_t first, Array<const std::int64_t> offsets,
                Array<const float> factors, bool exact, Matrix<float> to);

/// to[s, t] = from[s, ids[t] - first_row], 0 for ids of other ranks. Of one type.
void gather_columns(const Execution&, AnyMatrix from, Array<const std::uint32_t> ids, std::int64_t first_row,
                    AnyMatrix to);

/// products[t] = <g[t], rows[t]>, in fp64.
void multiply_rows(const Execution&, AnyMatrix g, Matrix<const float> rows, Array<double> products);

/// Example with this row, by its offsets. Rows outside all examples: -1.
WEFT_HOST_DEVICE inline std::int64_t example_of(Array<const std::int64_t> offsets, std::int64_t row) {
  std::int64_t below = 0, above = offsets.size - 1;  // offsets[below] <= row < offsets[above]
  if (above < 1 || row < offsets[0] || row >= offsets[above]) return -1;
  while (above - below > 1) {
    const std::int64_t middle = below + (above - below) / 2;
    if (offsets[middle] <= row)
      below = middle;
    else
      above = middle;
  }
  return below;
}

/// sums[b, j] = sum over the rows t of example b of (x[t, j] - shift[t]) * scale[t] * g[t, j]; without x of g[t, j].
WEFT_KERNEL(sum_example_columns, void(const Execution&, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                                      Array<const float> scale, Array<const std::int64_t> offsets, Matrix<float> sums));

}  // namespace weft::kernels
