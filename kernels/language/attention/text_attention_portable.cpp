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
        const float* query = row_chunk(team, queries, row, column, size, buffer.query);
        const auto read = [&](const AnyMatrix& rows, std::int32_t j) {
          return row_chunk(team, rows, text.begin + j, column, size, buffer.row);
        };
        const float total = attend(
            team, buffer, size, query, 0, static_cast<std::int32_t>(text.end - text.begin),
            [&](float product) { return a.scale * product; }, [&](std::int32_t j) { return read(keys, j); },
            [&](std::int32_t j) { return read(values, j); });
        store_chunk(team, out, row, column, size, [&](int c) { return buffer.sum[c] / total; });
      });
}

}  // namespace weft::kernels
