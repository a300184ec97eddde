// SPDX-License-Identifier: Apache-2.0
//
// A team forms a tile of C. It loads a panel of op(B), [kInner][kColumns], to scratch, adds its products with the rows
// of A to the sums of the tile, which are in scratch too, and goes on with the next inner indices.
//
// On one core, with vectors of AVX2, 512 rows reach 42 to 65 GFLOP/s, half of the rate of OpenBLAS with AVX-512. With
// 12 rows, 21 to 47 against 26 to 58: loading the panels takes as long as the products.
#include "kernels/gemm/row_product.hpp"
#include "kernels/panel_product.hpp"

namespace weft::kernels {
namespace {

struct ByRowTile {
#ifdef KOKKOS_ENABLE_CUDA
  static constexpr int kRows = 32, kColumns = 32, kInner = 32, kTogether = 8, kCopied = kRows;
  static constexpr int kStride = kColumns + 1;  ///< of the panel: lanes store a column of it to different banks
#else
  static constexpr int kRows = 128, kColumns = portable::panels::kLanes, kInner = 256,
                       kTogether = portable::panels::kMicroRows, kCopied = kTogether;
  static constexpr int kStride = kColumns;
#endif
  float sums[kRows * kColumns];
  float panel[kInner * kStride];
  float rows[kCopied * kInner];  ///< of A
};

/// panel[k][column] of op(B), for n_columns of kColumns columns. Other columns are not used.
KOKKOS_FORCEINLINE_FUNCTION void load_panel(const Team& team, const Matrix<const float>& b, bool transposed,
                                            std::int64_t first_inner, int n_inner, std::int64_t first_column,
                                            int n_columns, float* panel) {
  constexpr int kColumns = ByRowTile::kColumns, kStride = ByRowTile::kStride;
  if (transposed) {
    for (int column = 0; column < n_columns; ++column) {
      const float* from = b.row(first_column + column) + first_inner;
      for_columns(team, n_inner, [&](int k) { panel[k * kStride + column] = from[k]; });
    }
  } else {
    const float* from = b.row(first_inner) + first_column;
    const auto copy = [&](int count) {
      for (int k = 0; k < n_inner; ++k)
        for_columns(team, count, [&](int column) { panel[k * kStride + column] = from[k * b.stride + column]; });
    };
    if (n_columns == kColumns)
      copy(kColumns);  // a constant: one vector per row
    else
      copy(n_columns);
  }
}

/// sums[m][column] += sum over k of a(m, k) panel[k][column]. a: the first of n_rows rows; `rows`: memory.
KOKKOS_FORCEINLINE_FUNCTION void add_products(const Team& team, int n_rows, int n_inner, const float* a, int stride,
                                              const float* panel, float* rows, float* sums) {
  constexpr int kColumns = ByRowTile::kColumns, kInner = ByRowTile::kInner, kTogether = ByRowTile::kTogether;
  const auto copy = [&](int first) {  // with zeros up to a multiple of kTogether
    for (int m = first; m < n_rows || m % kTogether != 0; ++m) {
      float* to = rows + (m - first) * kInner;
      for_columns(team, n_inner, [&](int k) { to[k] = m < n_rows ? a[m * std::int64_t{stride} + k] : 0.0f; });
    }
    team.team_barrier();
  };
#ifdef KOKKOS_ENABLE_CUDA
  copy(0);
  for (int first = 0; first < n_rows; first += kTogether)
    for_columns(team, kColumns, [&](int column) {
      float sum[kTogether];
      for (int m = 0; m < kTogether; ++m) sum[m] = sums[(first + m) * kColumns + column];
      for (int k = 0; k < n_inner; ++k) {
        const float factor = panel[k * ByRowTile::kStride + column];
        for (int m = 0; m < kTogether; ++m) sum[m] = multiply_add(rows[(first + m) * kInner + k], factor, sum[m]);
      }
      for (int m = 0; m < kTogether; ++m) sums[(first + m) * kColumns + column] = sum[m];
    });
  team.team_barrier();
#else
  const int whole = n_rows / kTogether * kTogether;
  portable::panels::product<true>(team, whole, n_inner, {a, stride, 1}, panel, sums);
  if (whole == n_rows) return;
  copy(whole);
  portable::panels::product<true>(team, kTogether, n_inner, {rows, kInner, 1}, panel, sums + whole * kColumns);
#endif
}

}  // namespace

void multiply_by_row(const Execution& execution, float alpha, AnyMatrix a, Form, AnyMatrix b, Form b_form, float beta,
                     AnyMatrix c, Array<std::byte>) {
  constexpr int kRows = ByRowTile::kRows, kColumns = ByRowTile::kColumns, kInner = ByRowTile::kInner;
  const Matrix<const float> of_a{static_cast<const float*>(a.data), a.rows, a.columns, a.stride},
      of_b{static_cast<const float*>(b.data), b.rows, b.columns, b.stride};
  const Matrix<float> of_c{static_cast<float*>(c.data), c.rows, c.columns, c.stride};
  const bool transposed = b_form == Form::transposed;
  const std::int64_t tiles = (c.columns + kColumns - 1) / kColumns;
  for_teams(
      execution, "gemm: by row", (c.rows + kRows - 1) / kRows * tiles, sizeof(ByRowTile),
      KOKKOS_LAMBDA(const Team& team) {
        ByRowTile& tile = scratch<ByRowTile>(team);
        const std::int64_t task = team.league_rank(), row = task / tiles * kRows, column = task % tiles * kColumns;
        const int n_rows = smaller(kRows, of_c.rows - row), n_columns = smaller(kColumns, of_c.columns - column);
        for_columns(team, kRows * kColumns, [&](int i) { tile.sums[i] = 0.0f; });
        for (std::int64_t k = 0; k < of_a.columns; k += kInner) {
          const int n_inner = smaller(kInner, of_a.columns - k);
          load_panel(team, of_b, transposed, k, n_inner, column, n_columns, tile.panel);
          team.team_barrier();
          add_products(team, n_rows, n_inner, of_a.row(row) + k, static_cast<int>(of_a.stride), tile.panel, tile.rows,
                       tile.sums);
        }
        for (int m = 0; m < n_rows; ++m) {
          float* to = of_c.row(row + m) + column;
          const float* sum = tile.sums + m * kColumns;
          for_columns(team, n_columns, [&](int i) {
            const float product = rounded_product(alpha, sum[i]);
            to[i] = beta == 0.0f ? product : rounded_sum(product, rounded_product(beta, to[i]));
          });
        }
      });
}

}  // namespace weft::kernels
