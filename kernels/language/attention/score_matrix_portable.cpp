// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/mask.hpp"
#include "kernels/language/attention/score_matrix.hpp"
#include "kernels/language/exponential.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels {
namespace {

struct ScoreScratch {
  float a[kChunkColumns], b[kChunkColumns];
};

/// The keys that one row reads.
struct Visible {
  AttentionMask mask;
  KeptBlocks kept;
  int query, lower;

  KOKKOS_FORCEINLINE_FUNCTION Visible(const Attention& shape, std::int64_t row)
      : mask(mask_of(shape, row / (shape.heads * shape.length))),
        kept(kept_of(shape, row / (shape.heads * shape.length), row / shape.length % shape.heads)),
        query(static_cast<int>(row % shape.length)),
        lower(mask.lower(query)) {}
  KOKKOS_FORCEINLINE_FUNCTION bool operator()(int key) const {
    return key >= lower && key <= query && kept(query, key);
  }
};

KOKKOS_FORCEINLINE_FUNCTION float score(const Attention& shape, float product) {
  const float scaled = shape.scale * product;
  return shape.softcap > 0 ? shape.softcap * hyperbolic_tangent(scaled / shape.softcap) : scaled;
}

}  // namespace

void softmax_scores(const Execution& execution, const Attention& shape, AnyMatrix scores, Array<float> log_sum) {
  const Attention a = shape;
  for_rows<ScoreScratch>(
      execution, "softmax_scores", scores.rows,
      KOKKOS_LAMBDA(const Team& team, ScoreScratch& buffer, std::int64_t row) {
        const Visible visible(a, row);
        const float none = -INFINITY;
        float largest = none, sum = 0.0f;
        for_chunks(a.length, a.length, [&](std::int64_t column, int count) {
          const float* x = row_chunk(team, scores, row, column, count, buffer.a);
          const int key = static_cast<int>(column);
          largest = max_columns(team, count, largest, [&](int c) { return visible(key + c) ? score(a, x[c]) : none; });
        });
        for_chunks(a.length, a.length, [&](std::int64_t column, int count) {
          const float* x = row_chunk(team, scores, row, column, count, buffer.a);
          const int key = static_cast<int>(column);
          sum += sum_columns<float>(
              team, count, [&](int c) { return visible(key + c) ? exponential(score(a, x[c]) - largest) : 0.0f; });
        });
        const float log_of_sum = largest + logf(sum);
        for_chunks(a.length, a.length, [&](std::int64_t column, int count) {
          const float* x = row_chunk(team, scores, row, column, count, buffer.a);
          const int key = static_cast<int>(column);
          store_chunk(team, scores, row, column, count,
                      [&](int c) { return visible(key + c) ? exponential(score(a, x[c]) - log_of_sum) : 0.0f; });
        });
        once(team, [&] { log_sum[row] = log_of_sum; });
      });
}

void softmax_scores_backward(const Execution& execution, const Attention& shape, AnyMatrix probabilities,
                             Array<const float> log_sum, AnyMatrix gradient) {
  const Attention a = shape;
  for_rows<ScoreScratch>(
      execution, "softmax_scores_backward", gradient.rows,
      KOKKOS_LAMBDA(const Team& team, ScoreScratch& buffer, std::int64_t row) {
        float delta = 0.0f;
        for_chunks(a.length, a.length, [&](std::int64_t column, int count) {
          const float *p = row_chunk(team, probabilities, row, column, count, buffer.a),
                      *g = row_chunk(team, gradient, row, column, count, buffer.b);
          delta += sum_columns<float>(team, count, [&](int c) { return p[c] * g[c]; });
        });
        const float lse = log_sum[row];
        for_chunks(a.length, a.length, [&](std::int64_t column, int count) {
          const float *p = row_chunk(team, probabilities, row, column, count, buffer.a),
                      *g = row_chunk(team, gradient, row, column, count, buffer.b);
          store_chunk(team, gradient, row, column, count, [&](int c) {
            if (p[c] == 0.0f) return 0.0f;  // hidden, or without weight
            float slope = a.scale;
            if (a.softcap > 0) {
              const float capped = (logf(p[c]) + lse) / a.softcap;
              slope *= 1.0f - capped * capped;
            }
            return p[c] * (g[c] - delta) * slope;
          });
        });
      });
}

}  // namespace weft::kernels
