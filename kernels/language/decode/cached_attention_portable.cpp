// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attend_row.hpp"
#include "kernels/language/decode/cached_attention.hpp"

namespace weft::kernels {
namespace {

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
  for_rows<AttendScratch>(
      execution, "cached_attention", queries.rows * a.heads,
      KOKKOS_LAMBDA(const Team& team, AttendScratch& buffer, std::int64_t index) {
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
          const float* key = row_chunk(team, keys, row, key_column, size, buffer.row[0]);
          store_chunk(team, cached_keys, to, key_column, size, [&](int c) { return key[c]; });
          const float* value = row_chunk(team, values, row, key_column, size, buffer.row[0]);
          store_chunk(team, cached_values, to, key_column, size, [&](int c) { return value[c]; });
        }
        const auto read = [&](const AnyMatrix& fresh, const AnyMatrix& cache, std::int32_t key, float* to) {
          return key == position ? row_chunk(team, fresh, row, key_column, size, to)
                                 : row_chunk(team, cache, sequence.row(key), key_column, size, to);
        };
        load_query(team, buffer, queries, row, column, size, a.scale);
        const std::int32_t lower =
            a.window > 0 && position >= a.window ? position - static_cast<std::int32_t>(a.window) + 1 : 0;
        const float by = 1.0f / attend(
                                    team, buffer, size, lower, position + 1, a.softcap,
                                    [&](std::int32_t key, float* to) { return read(keys, cached_keys, key, to); },
                                    [&](std::int32_t key, float* to) { return read(values, cached_values, key, to); });
        store_chunk(team, out, row, column, size, [&](int c) { return by * buffer.sum[c]; });
      });
}

}  // namespace portable
}  // namespace weft::kernels
