// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/norm/norm.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels::portable {
namespace {

struct NormScratch {
  float h[kChunkColumns], other[kChunkColumns], addend[kChunkColumns];
};

}  // namespace

void norm_forward(const Execution& execution, const NormWeights& weights, AnyMatrix x, AnyMatrix addend, AnyMatrix sum,
                  AnyMatrix y, const NormStatistics& statistics) {
  const NormWeights w = weights;
  const NormStatistics s = statistics;
  // The norm of h as stored, so that recomputing it from h gives the same bits.
  const AnyMatrix h = addend.data == nullptr ? x : sum;
  for_rows<NormScratch>(
      execution, "norm_forward", x.rows, KOKKOS_LAMBDA(const Team& team, NormScratch& buffer, std::int64_t row) {
        if (addend.data != nullptr)
          for_chunks(x.columns, x.columns, [&](std::int64_t column, int count) {
            const float* a = row_chunk(team, x, row, column, count, buffer.h);
            const float* b = row_chunk(team, addend, row, column, count, buffer.addend);
            store_chunk(team, sum, row, column, count, [&](int c) { return a[c] + b[c]; });
          });
        float mean = 0.0f;
        if (w.kind == Norm::layer) {
          for_chunks(x.columns, x.columns, [&](std::int64_t column, int count) {
            const float* a = row_chunk(team, h, row, column, count, buffer.h);
            mean += sum_columns<float>(team, count, [&](int c) { return a[c]; });
          });
          mean /= static_cast<float>(x.columns);
        }
        float squares = 0.0f;
        for_chunks(x.columns, x.columns, [&](std::int64_t column, int count) {
          const float* a = row_chunk(team, h, row, column, count, buffer.h);
          squares += sum_columns<float>(team, count, [&](int c) { return (a[c] - mean) * (a[c] - mean); });
        });
        const float inverse = 1.0f / sqrtf(squares / static_cast<float>(x.columns) + w.epsilon);
        for_chunks(x.columns, x.columns, [&](std::int64_t column, int count) {
          const float* a = row_chunk(team, h, row, column, count, buffer.h);
          const float* weight = w.weight.data + column;
          if (w.bias.data == nullptr) {
            store_chunk(team, y, row, column, count, [&](int c) { return weight[c] * ((a[c] - mean) * inverse); });
          } else {
            const float* bias = w.bias.data + column;
            store_chunk(team, y, row, column, count,
                        [&](int c) { return weight[c] * ((a[c] - mean) * inverse) + bias[c]; });
          }
        });
        once(team, [&] {
          if (s.mean.data != nullptr) s.mean[row] = mean;
          s.inverse[row] = inverse;
        });
      });
}

void norm_backward(const Execution& execution, const NormWeights& weights, AnyMatrix h,
                   const NormStatistics& statistics, AnyMatrix dy, AnyMatrix addend, AnyMatrix dh,
                   const NormSums& partial) {
  const NormWeights w = weights;
  const NormStatistics s = statistics;
  const NormSums sums = partial;
  const NormBlocks blocks = sums.blocks.length > 0 ? sums.blocks : NormBlocks::of(h.rows);
  for_teams(
      execution, "norm_backward", blocks.count(h.rows), sizeof(NormScratch), KOKKOS_LAMBDA(const Team& team) {
        NormScratch& buffer = scratch<NormScratch>(team);
        const bool centred = w.kind == Norm::layer;
        const std::int64_t block = team.league_rank(), begin = blocks.begin(block), end = blocks.end(block, h.rows);
        for (std::int64_t row = begin; row < end; ++row) {
          const float mean = centred ? s.mean[row] : 0.0f, inverse = s.inverse[row];
          float sum = 0.0f, product = 0.0f;  // of a, and of a * xhat
          for_chunks(h.columns, h.columns, [&](std::int64_t column, int count) {
            const float* x = row_chunk(team, h, row, column, count, buffer.h);
            const float* g = row_chunk(team, dy, row, column, count, buffer.other);
            const float* weight = w.weight.data + column;
            if (centred) sum += sum_columns<float>(team, count, [&](int c) { return weight[c] * g[c]; });
            product += sum_columns<float>(team, count, [&](int c) { return weight[c] * g[c] * (x[c] - mean); });
          });
          const float mean_a = sum / static_cast<float>(h.columns);
          const float mean_ax = product * inverse / static_cast<float>(h.columns);
          for_chunks(h.columns, h.columns, [&](std::int64_t column, int count) {
            const float* x = row_chunk(team, h, row, column, count, buffer.h);
            const float* g = row_chunk(team, dy, row, column, count, buffer.other);
            const float* weight = w.weight.data + column;
            const auto add = [&](const Matrix<float>& to, const auto& value) {
              if (to.data == nullptr) return;
              float* total = to.row(block) + column;
              if (row == begin)
                for_columns(team, count, [&](int c) { total[c] = value(c); });
              else
                for_columns(team, count, [&](int c) { total[c] += value(c); });
            };
            add(sums.weight, [&](int c) { return g[c] * ((x[c] - mean) * inverse); });
            add(sums.bias, [&](int c) { return g[c]; });
            const auto gradient = [&](int c) {
              return inverse * (weight[c] * g[c] - mean_a - (x[c] - mean) * inverse * mean_ax);
            };
            if (addend.data == nullptr) {
              store_chunk(team, dh, row, column, count, gradient);
            } else {
              const float* before = row_chunk(team, addend, row, column, count, buffer.addend);
              store_chunk(team, dh, row, column, count, [&](int c) { return before[c] + gradient(c); });
            }
            const float* stored =
                sums.input.data == nullptr ? nullptr : row_chunk(team, dh, row, column, count, buffer.addend);
            add(sums.input, [&](int c) { return stored[c]; });
          });
        }
      });
}

}  // namespace weft::kernels::portable
