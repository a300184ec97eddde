// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attend_row.hpp"
#include "kernels/language/attention/text_attention.hpp"

namespace weft::kernels {

void text_attention(const Execution& execution, const TextAttention& shape, AnyMatrix queries, AnyMatrix keys,
                    AnyMatrix values, AnyMatrix out) {
  const TextAttention a = shape;
  for_rows<AttendScratch>(
      execution, "text attention", queries.rows * a.heads,
      KOKKOS_LAMBDA(const Team& team, AttendScratch& buffer, std::int64_t index) {
        const std::int64_t row = index / a.heads, column = index % a.heads * a.head_size;
        const int size = static_cast<int>(a.head_size);
        const TextRows text = a.texts[row];
        load_query(team, buffer, queries, row, column, size, a.scale);
        const float by =
            1.0f /
            attend(
                team, buffer, size, 0, static_cast<std::int32_t>(text.end - text.begin), 0.0f,
                [&](std::int32_t j, float* to) { return row_chunk(team, keys, text.begin + j, column, size, to); },
                [&](std::int32_t j, float* to) { return row_chunk(team, values, text.begin + j, column, size, to); });
        store_chunk(team, out, row, column, size, [&](int c) { return by * buffer.sum[c]; });
      });
}

}  // namespace weft::kernels
