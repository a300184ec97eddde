// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention_shape.hpp"
#include "kernels/language/attention/text_attention.hpp"
#include "kernels/language/exponential.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels {
namespace {

/// Keys whose probabilities are formed together.
constexpr int kKeys = 64;

struct TextAttentionScratch {
  float query[kLargestHead], row[kLargestHead], sum[kLargestHead];
  float score[kKeys];
};
static_assert(kLargestHead <= kChunkColumns);

}  // namespace

void text_attention(const Execution& execution, const TextAttention& shape, AnyMatrix queries, AnyMatrix keys,
                    AnyMatrix values, AnyMatrix out) {
  const TextAttention a = shape;
  for_rows<TextAttentionScratch>(
      execution, "text attention", queries.rows * a.heads,
      KOKKOS_LAMBDA(const Team& team, TextAttentionScratch& buffer, std::int64_t index) {
        const std::int64_t row = index / a.heads, column = index % a.heads * a.head_size;
        const int size = static_cast<int>(a.head_size);
        const TextRows text = a.texts[row];
        const float* query = row_chunk(team, queries, row, column, size, buffer.query);
        float largest = bits_float(0xff800000u), total = 0.0f;
        for_columns(team, size, [&](int c) { buffer.sum[c] = 0.0f; });
        for (std::int64_t begin = text.begin; begin < text.end; begin += kKeys) {
          const int count = smaller(kKeys, text.end - begin);
          float most = largest;
          for (int i = 0; i < count; ++i) {
            const float* key = row_chunk(team, keys, begin + i, column, size, buffer.row);
            const float score = a.scale * sum_columns<float>(team, size, [&](int c) { return query[c] * key[c]; });
            once(team, [&] { buffer.score[i] = score; });
            most = score > most ? score : most;
          }
          team.team_barrier();
          const float factor = exponential(largest - most);
          largest = most;
          total *= factor;
          for_columns(team, size, [&](int c) { buffer.sum[c] *= factor; });
          for (int i = 0; i < count; ++i) {
            const float probability = exponential(buffer.score[i] - largest);
            total += probability;
            const float* value = row_chunk(team, values, begin + i, column, size, buffer.row);
            for_columns(team, size, [&](int c) { buffer.sum[c] += probability * value[c]; });
          }
          team.team_barrier();
        }
        store_chunk(team, out, row, column, size, [&](int c) { return buffer.sum[c] / total; });
      });
}

}  // namespace weft::kernels
