// SPDX-License-Identifier: Apache-2.0
#include "kernels/gradient/gradient.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {
namespace {

/// Rows that are summed before the sum is added to the total: bounds the rounding error of long sums.
constexpr std::int64_t kRowsPerBlock = 128;
/// Columns that one team sums.
constexpr int kOwnColumns = 64;

struct ColumnScratch {
  float block[kOwnColumns], a[kOwnColumns], b[kOwnColumns];
};

/// out[j] += sum over n of a[n, j] * b[n, j]; without b (no memory) of a[n, j].
void add_columns(const Execution& execution, const char* name, AnyMatrix a, AnyMatrix b, Array<float> out) {
  for_teams(
      execution, name, (out.size + kOwnColumns - 1) / kOwnColumns, sizeof(ColumnScratch),
      KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t column = team.league_rank() * std::int64_t{kOwnColumns};
        const int count = smaller(kOwnColumns, out.size - column);
        ColumnScratch& buffer = scratch<ColumnScratch>(team);
        for (std::int64_t begin = 0; begin < a.rows; begin += kRowsPerBlock) {
          const std::int64_t end = begin + smaller(kRowsPerBlock, a.rows - begin);
          for_columns(team, count, [&](int c) { buffer.block[c] = 0.0f; });
          for (std::int64_t n = begin; n < end; ++n) {
            const float* x = row_chunk(team, a, n, column, count, buffer.a);
            if (b.data == nullptr) {
              for_columns(team, count, [&](int c) { buffer.block[c] += x[c]; });
            } else {
              const float* y = row_chunk(team, b, n, column, count, buffer.b);
              for_columns(team, count, [&](int c) { buffer.block[c] += x[c] * y[c]; });
            }
          }
          for_columns(team, count, [&](int c) { out[column + c] += buffer.block[c]; });
        }
      });
}

}  // namespace

void add_column_sums(const Execution& execution, AnyMatrix g, Array<float> out) {
  add_columns(execution, "add_column_sums", g, {}, out);
}

void add_column_products(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<float> out) {
  add_columns(execution, "add_column_products", x, g, out);
}

void add_rows_by_id(const Execution& execution, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                    Matrix<float> out) {
  // The team of an id's first occurrence adds all of its rows: each row of `out` has one writer.
  for_teams(
      execution, "add_rows_by_id", ids.size, kChunkColumns * sizeof(float), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t first = team.league_rank();
        const std::uint32_t id = ids[first];
        const std::int64_t row = static_cast<std::int64_t>(id) - first_row;
        if (row < 0 || row >= out.rows) return;
        for (std::int64_t begin = 0; begin < first; begin += kChunkColumns) {
          const int count = smaller(kChunkColumns, first - begin);
          if (sum_columns<int>(team, count, [&](int c) { return ids[begin + c] == id ? 1 : 0; }) > 0) return;
        }
        auto& buffer = scratch<float[kChunkColumns]>(team);
        for (std::int64_t n = first; n < ids.size; ++n) {
          if (ids[n] != id) continue;
          for_chunks(out.columns, out.columns, [&](std::int64_t column, int count) {
            const float* gradient = row_chunk(team, g, n, column, count, buffer);
            for_columns(team, count, [&](int c) { out(row, column + c) += gradient[c]; });
          });
        }
      });
}

}  // namespace weft::kernels
