// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/linear/linear.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels {
namespace {

struct JoinScratch {
  float weight[kChunkColumns];
};

KOKKOS_FORCEINLINE_FUNCTION float element(const AnyMatrix& matrix, std::int64_t row, std::int64_t column) {
  const std::int64_t at = row * matrix.stride + column;
  return matrix.type == Scalar::fp32 ? static_cast<const float*>(matrix.data)[at]
                                     : float{static_cast<const bf16*>(matrix.data)[at]};
}

}  // namespace

JoinedNorm join_norm(const Execution& execution, const LinearWeights& weights, const NormWeights& norm,
                     Matrix<bf16> joined, Array<float> bias, Array<float> sums) {
  const AnyMatrix matrix = weights.matrix;
  const bool transposed = weights.transposed;
  const NormWeights of_norm = norm;
  const Array<const float> added = weights.bias;
  for_rows<JoinScratch>(
      execution, "join_norm", joined.rows, KOKKOS_LAMBDA(const Team& team, JoinScratch& buffer, std::int64_t row) {
        float sum = 0.0f, of_bias = 0.0f;
        for_chunks(joined.columns, joined.columns, [&](std::int64_t column, int count) {
          const float* weight;
          if (transposed) {
            for_columns(team, count, [&](int c) { buffer.weight[c] = element(matrix, column + c, row); });
            weight = buffer.weight;
          } else {
            weight = row_chunk(team, matrix, row, column, count, buffer.weight);
          }
          bf16* const to = joined.data + row * joined.stride + column;
          const float* const factor = of_norm.weight.data + column;
          for_columns(team, count, [&](int c) { to[c] = to_bf16(weight[c] * factor[c]); });
          // Element c belongs to one lane in all of these steps.
          sum += sum_columns<float>(team, count, [&](int c) { return float{to[c]}; });
          if (of_norm.bias.data != nullptr) {
            const float* const shift = of_norm.bias.data + column;
            of_bias += sum_columns<float>(team, count, [&](int c) { return weight[c] * shift[c]; });
          }
        });
        once(team, [&] {
          sums[row] = sum;
          bias[row] = (added.size > 0 ? added[row] : 0.0f) + of_bias;
        });
      });
  return {.weights = {.matrix = {joined.data, Scalar::bf16, joined.rows, joined.columns, joined.stride}, .bias = bias},
          .sums = sums,
          .kind = norm.kind,
          .epsilon = norm.epsilon};
}

}  // namespace weft::kernels
