// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/norm/frozen_norm.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels {
namespace {

struct FrozenNormScratch {};
struct FrozenNormRow {
  float h[kChunkColumns];
};

}  // namespace

void frozen_norm_forward(const Execution& execution, const NormWeights& weights, Array<const float> inverse,
                         AnyMatrix h, AnyMatrix y) {
  const NormWeights w = weights;
  for_rows<FrozenNormRow>(
      execution, "frozen_norm_forward", h.rows,
      KOKKOS_LAMBDA(const Team& team, FrozenNormRow& buffer, std::int64_t row) {
        float mean = 0.0f;
        if (w.kind == Norm::layer) {
          for_chunks(h.columns, h.columns, [&](std::int64_t column, int count) {
            const float* a = row_chunk(team, h, row, column, count, buffer.h);
            mean += sum_columns<float>(team, count, [&](int c) { return a[c]; });
          });
          mean /= static_cast<float>(h.columns);
        }
        const float r = inverse[row];
        for_chunks(h.columns, h.columns, [&](std::int64_t column, int count) {
          const float* a = row_chunk(team, h, row, column, count, buffer.h);
          const float* weight = w.weight.data + column;
          const float* bias = w.bias.data == nullptr ? nullptr : w.bias.data + column;
          store_chunk(team, y, row, column, count,
                      [&](int c) { return weight[c] * ((a[c] - mean) * r) + (bias == nullptr ? 0.0f : bias[c]); });
        });
      });
}

void frozen_norm_backward(const Execution& execution, const NormWeights& weights, Array<const float> inverse,
                          std::int64_t group, Matrix<const float> dy, Matrix<const float> addend, Matrix<float> dh) {
  const NormWeights w = weights;
  for_rows<FrozenNormScratch>(
      execution, "frozen_norm_backward", dy.rows,
      KOKKOS_LAMBDA(const Team& team, FrozenNormScratch&, std::int64_t row) {
        const float* gradient = dy.row(row);
        float mean = 0.0f;
        if (w.kind == Norm::layer) {
          for_chunks(dy.columns, dy.columns, [&](std::int64_t column, int count) {
            mean += sum_columns<float>(team, count, [&](int c) { return w.weight[column + c] * gradient[column + c]; });
          });
          mean /= static_cast<float>(dy.columns);
        }
        const float r = inverse[row / group];
        const float* before = addend.data == nullptr ? nullptr : addend.row(row);
        float* to = dh.row(row);
        for_chunks(dy.columns, dy.columns, [&](std::int64_t first, int count) {
          for_columns(team, count, [&](int c) {
            const float change = r * (w.weight[first + c] * gradient[first + c] - mean);
            to[first + c] = before == nullptr ? change : before[first + c] + change;
          });
        });
      });
}

}  // namespace weft::kernels
