// SPDX-License-Identifier: Apache-2.0
//
// Sums in a fixed order: contributions of ranks are added in rank order, in fp32; scalars are formed in fp64 from
// blocks of fixed size. Results do not depend on the number of threads.
#pragma once

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

/// out[n, j] = bias[j] + sum over parts of partial[p * rows + n, j], as residual_and_loss forms it: a reconstruction in
/// normalised space. partial [n_parts * out.rows, columns] fp32 or bf16.
void reconstruct(const Execution&, AnyMatrix partial, std::int64_t n_parts, Array<const float> bias, Matrix<float> out);

/// out[n, j] = sum over parts of parts[p * out.rows + n, j], in their order, in fp32. Both of one type, fp32, bf16 or
/// fp16; parts [n_parts * out.rows, out.columns].
WEFT_KERNEL(sum_parts, void(const Execution&, AnyMatrix parts, std::int64_t n_parts, AnyMatrix out));

/// out[j] = sum over rows of rows[i, j], in their order, in fp32.
void sum_rows(const Execution&, Matrix<const float> rows, Array<float> out);

/// out[i] (+)= sum of squares of row i.
void add_row_norms(const Execution&, Matrix<const float> rows, Array<double> out);

/// into[i] += from[i].
void accumulate(const Execution&, Array<const double> from, Array<double> into);

/// counts[layer] += entries of the layer's features: [n_layers].
void accumulate_layer_counts(const Execution&, Array<const std::int64_t> hit_offsets, std::int64_t n_features,
                             Array<double> counts);

/// *out = number of values that are at least `bound`.
void count_at_least(const Execution&, Array<const std::int64_t> values, std::int64_t bound, std::int64_t* out);

/// The largest entries of each row over several calls: value descending, equal ones by index. Before the first call all
/// indices are -1; the value of an entry with index -1 has no meaning.
struct LargestOfRows {
  Matrix<float> value;         ///< [rows, k]
  Matrix<std::int64_t> index;  ///< [rows, k]
};
inline constexpr std::int64_t kNoIndex = -(std::int64_t{1} << 62);
/// Joins sign * rows to `largest`. Column j has the index first + j, more than every index of an earlier call. Row i is
/// not compared with index `self` + i (kNoIndex: with all). NaN is left out.
void keep_largest(const Execution&, Matrix<const float> rows, float sign, std::int64_t first, std::int64_t self,
                  LargestOfRows largest);

/// Values that `total` sums to one value of its workspace.
inline constexpr std::int64_t kTotalBlock = 4096;
constexpr std::int64_t total_workspace(std::int64_t size) { return (size + kTotalBlock - 1) / kTotalBlock; }
/// *out = sum of values. workspace: [total_workspace(size)].
void total(const Execution&, Array<const double> values, Array<double> workspace, double* out);
void total(const Execution&, Array<const float> values, Array<double> workspace, double* out);

}  // namespace weft::kernels
