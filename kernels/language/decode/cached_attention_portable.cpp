// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/decode/cached_attention.hpp"
#include "kernels/language/exponential.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels {
namespace {

/// Keys whose probabilities are formed together. Blocks begin at multiples of this position.
constexpr int kBlock = 64;

struct CachedAttentionScratch {
  float query[kLargestHead], row[kLargestHead], sum[kLargestHead];
  float score[kBlock];
};
static_assert(kLargestHead <= kChunkColumns);

struct StoreScratch {
  float row[kChunkColumns];
};

}  // namespace

namespace portable {

void store_rows(const Execution& execution, AnyMatrix in, Array<const std::int64_t> to, AnyMatrix out) {
  for_rows<StoreScratch>(
      execution, "store_rows", in.rows, KOKKOS_LAMBDA(const Team& team, StoreScratch& buffer, std::int64_t row) {
        if (to[row] < 0) return;
        for_chunks(in.columns, in.columns, [&](std::int64_t column, int count) {
          const float* x = row_chunk(team, in, row, column, count, buffer.row);
          store_chunk(team, out, to[row], column, count, [&](int c) { return x[c]; });
        });
      });
}

void cached_attention(const Execution& execution, const CachedAttention& shape, AnyMatrix queries, AnyMatrix keys,
                      AnyMatrix values, AnyMatrix cached_keys, AnyMatrix cached_values, AnyMatrix out) {
  const CachedAttention a = shape;
  for_rows<CachedAttentionScratch>(
      execution, "cached_attention", queries.rows * a.heads,
      KOKKOS_LAMBDA(const Team& team, CachedAttentionScratch& buffer, std::int64_t index) {
        const std::int64_t row = index / a.heads, head = index % a.heads, group = a.heads / a.kv_heads;
        const std::int64_t column = head * a.head_size, key_column = head / group * a.head_size;
        const int size = static_cast<int>(a.head_size);
        const CachedSequence sequence = a.sequences[row];
        const std::int32_t position = a.positions[row];
        if (position >= sequence.end) {
          store_chunk(team, out, row, column, size, [](int) { return 0.0f; });
          return;
        }
        // The new row is read where it came from: another team stores it.
        if (head % group == 0) {
          const std::int64_t to = sequence.row(position);
          const float* key = row_chunk(team, keys, row, key_column, size, buffer.row);
          store_chunk(team, cached_keys, to, key_column, size, [&](int c) { return key[c]; });
          const float* value = row_chunk(team, values, row, key_column, size, buffer.row);
          store_chunk(team, cached_values, to, key_column, size, [&](int c) { return value[c]; });
        }
        const auto read = [&](const AnyMatrix& fresh, const AnyMatrix& cache, std::int32_t key) {
          return key == position ? row_chunk(team, fresh, row, key_column, size, buffer.row)
                                 : row_chunk(team, cache, sequence.row(key), key_column, size, buffer.row);
        };
        const float* query = row_chunk(team, queries, row, column, size, buffer.query);
        const std::int32_t lower =
            a.window > 0 && position >= a.window ? position - static_cast<std::int32_t>(a.window) + 1 : 0;
        float largest = bits_float(0xff800000u), total = 0.0f;
        for_columns(team, size, [&](int c) { buffer.sum[c] = 0.0f; });
        for (std::int32_t block = lower / kBlock * kBlock; block <= position; block += kBlock) {
          const std::int32_t begin = block > lower ? block : lower,
                             end = block + kBlock <= position ? block + kBlock : position + 1;
          float most = largest;
          for (std::int32_t key = begin; key < end; ++key) {
            const float* k = read(keys, cached_keys, key);
            float score = a.scale * sum_columns<float>(team, size, [&](int c) { return query[c] * k[c]; });
            if (a.softcap > 0) score = a.softcap * hyperbolic_tangent(score / a.softcap);
            once(team, [&] { buffer.score[key - begin] = score; });
            most = score > most ? score : most;
          }
          team.team_barrier();
          const float factor = exponential(largest - most);
          largest = most;
          total *= factor;
          for_columns(team, size, [&](int c) { buffer.sum[c] *= factor; });
          for (std::int32_t key = begin; key < end; ++key) {
            const float probability = exponential(buffer.score[key - begin] - largest);
            total += probability;
            const float* v = read(values, cached_values, key);
            for_columns(team, size, [&](int c) { buffer.sum[c] += probability * v[c]; });
          }
          team.team_barrier();
        }
        store_chunk(team, out, row, column, size, [&](int c) { return buffer.sum[c] / total; });
      });
}

}  // namespace portable
}  // namespace weft::kernels
