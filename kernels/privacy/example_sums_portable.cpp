// SPDX-License-Identifier: Apache-2.0
#include "kernels/gradient/rows_by_id.hpp"
#include "kernels/portable.hpp"
#include "kernels/privacy/example_sums.hpp"

namespace weft::kernels {
namespace {

struct PairScratch {
  float left[kChunkColumns], right[kChunkColumns];
};

KOKKOS_FORCEINLINE_FUNCTION double row_product(const Team& team, PairScratch& buffer, const AnyMatrix& matrix,
                                               std::int64_t t, std::int64_t s) {
  double total = 0;
  for (std::int64_t column = 0; column < matrix.columns; column += kChunkColumns) {
    const int count = smaller(kChunkColumns, matrix.columns - column);
    team.team_barrier();  // the buffers are free again
    const float* left = row_chunk(team, matrix, t, column, count, buffer.left);
    const float* right = row_chunk(team, matrix, s, column, count, buffer.right);
    total += sum_columns<double>(team, count,
                                 [&](int c) { return static_cast<double>(left[c]) * static_cast<double>(right[c]); });
  }
  return total;
}

struct WeighScratch {
  float row[kChunkColumns];
};

template <class Value>
void gather_columns_of(const Execution& execution, const AnyMatrix& from, Array<const std::uint32_t> ids,
                       std::int64_t first_row, const AnyMatrix& to) {
  const Value* source = static_cast<const Value*>(from.data);
  Value* target = static_cast<Value*>(to.data);
  const std::int64_t stride = from.stride, table = from.columns, columns = to.columns;
  for_all(
      execution, "gather_columns", to.rows * columns, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = table_row(ids[i % columns], first_row, table);
        target[i] = row == table ? Value{} : source[i / columns * stride + row];
      });
}

}  // namespace

void add_pairwise_norms(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<const std::int64_t> offsets,
                        std::int64_t most_rows, Array<double> norms) {
  for_teams(
      execution, "add_pairwise_norms", norms.size, sizeof(PairScratch), KOKKOS_LAMBDA(const Team& team) {
        PairScratch& buffer = scratch<PairScratch>(team);
        const std::int64_t e = team.league_rank(), begin = offsets[e], end = offsets[e + 1];
        if (end - begin > most_rows) return;
        double total = 0;
        for (std::int64_t t = begin; t < end; ++t)
          for (std::int64_t s = begin; s <= t; ++s)
            total += (s == t ? 1.0 : 2.0) * row_product(team, buffer, x, t, s) * row_product(team, buffer, g, t, s);
        once(team, [&] { norms[e] += total; });
      });
}

void weigh_rows(const Execution& execution, AnyMatrix from, std::int64_t first, Array<const std::int64_t> offsets,
                Array<const float> factors, bool exact, Matrix<float> to) {
  for_teams(
      execution, "weigh_rows", to.rows, sizeof(WeighScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t i = team.league_rank(), e = example_of(offsets, first + i);
        const float factor = e < 0 ? 0.0f : factors[e];
        float* row = to.row(i);
        WeighScratch& buffer = scratch<WeighScratch>(team);
        for (std::int64_t column = 0; column < from.columns; column += kChunkColumns) {
          const int count = smaller(kChunkColumns, from.columns - column);
          if (factor == 0.0f) {
            for_columns(team, count, [&](int c) { row[column + c] = 0.0f; });
            continue;
          }
          const float times = exact ? 1.0f : factor;
          const float* value = row_chunk(team, from, first + i, column, count, buffer.row);
          for_columns(team, count, [&](int c) { row[column + c] = times * value[c]; });
        }
      });
}

void gather_columns(const Execution& execution, AnyMatrix from, Array<const std::uint32_t> ids, std::int64_t first_row,
                    AnyMatrix to) {
  if (from.type == Scalar::fp32)
    gather_columns_of<float>(execution, from, ids, first_row, to);
  else
    gather_columns_of<std::uint16_t>(execution, from, ids, first_row, to);
}

void multiply_rows(const Execution& execution, AnyMatrix g, Matrix<const float> rows, Array<double> products) {
  for_teams(
      execution, "multiply_rows", g.rows, sizeof(PairScratch), KOKKOS_LAMBDA(const Team& team) {
        PairScratch& buffer = scratch<PairScratch>(team);
        const std::int64_t t = team.league_rank();
        double total = 0;
        for (std::int64_t column = 0; column < g.columns; column += kChunkColumns) {
          const int count = smaller(kChunkColumns, g.columns - column);
          team.team_barrier();
          const float* gradient = row_chunk(team, g, t, column, count, buffer.left);
          const float* other = rows.row(t) + column;
          total += sum_columns<double>(
              team, count, [&](int c) { return static_cast<double>(gradient[c]) * static_cast<double>(other[c]); });
        }
        once(team, [&] { products[t] = total; });
      });
}

void add_row_values(const Execution& execution, Array<const double> values, Array<const std::int64_t> offsets,
                    std::int64_t first, double weight, Array<double> norms) {
  for_teams(
      execution, "add_row_values", norms.size, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t e = team.league_rank(), end = offsets[e + 1] - first;
        double total = 0;
        for (std::int64_t begin = offsets[e] - first; begin < end; begin += kSquareBlock)
          total +=
              sum_columns<double>(team, smaller(kSquareBlock, end - begin), [&](int i) { return values[begin + i]; });
        once(team, [&] { norms[e] += weight * total; });
      });
}

namespace portable {
namespace {

template <class Value>
void add_squares_of(const Execution& execution, Matrix<const Value> values, Array<double> norms, Array<double> parts) {
  const std::int64_t n_parts = square_parts(values.columns);
  for_teams(
      execution, "add_squares", values.rows * n_parts, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t part = team.league_rank(), first = part % n_parts * kSquareBlock;
        const Value* from = values.row(part / n_parts) + first;
        const double sum = sum_columns<double>(team, smaller(kSquareBlock, values.columns - first), [&](int i) {
          const double value = static_cast<double>(static_cast<float>(from[i]));
          return value * value;
        });
        once(team, [&] { parts[part] = sum; });
      });
  kernels::add_parts(execution, n_parts, 1, norms, parts);
}

template <class Value>
void add_weighed_of(const Execution& execution, Matrix<const Value> values, Array<const float> factors,
                    Matrix<float> out) {
  const std::int64_t columns = out.columns;
  for_all(
      execution, "add_weighed", values.columns, KOKKOS_LAMBDA(std::int64_t i) {
        float& element = out(i / columns, i % columns);
        float sum = element;
        for (std::int64_t b = 0; b < values.rows; ++b)
          if (factors[b] != 0.0f) sum += factors[b] * static_cast<float>(values(b, i));
        element = sum;
      });
}

template <class Value>
Matrix<const Value> values_of(const AnyMatrix& matrix) {
  return {static_cast<const Value*>(matrix.data), matrix.rows, matrix.columns, matrix.stride};
}

struct ExampleColumnScratch {
  float total[kChunkColumns], block[kChunkColumns], x[kChunkColumns], g[kChunkColumns];
};

}  // namespace

void add_parts(const Execution& execution, std::int64_t n_parts, double weight, Array<double> norms,
               Array<const double> parts) {
  for_teams(
      execution, "add_parts", norms.size, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t b = team.league_rank();
        double total = 0;
        for (std::int64_t first = 0; first < n_parts; first += kSquareBlock)
          total += sum_columns<double>(team, smaller(kSquareBlock, n_parts - first),
                                       [&](int i) { return parts[b * n_parts + first + i]; });
        once(team, [&] { norms[b] += weight * total; });
      });
}

void add_squares(const Execution& execution, AnyMatrix values, Array<double> norms, Array<double> parts) {
  if (values.type == Scalar::fp32)
    add_squares_of(execution, values_of<float>(values), norms, parts);
  else
    add_squares_of(execution, values_of<bf16>(values), norms, parts);
}

void add_weighed(const Execution& execution, AnyMatrix values, Array<const float> factors, Matrix<float> out) {
  if (values.type == Scalar::fp32)
    add_weighed_of(execution, values_of<float>(values), factors, out);
  else
    add_weighed_of(execution, values_of<bf16>(values), factors, out);
}

void add_inner_products(const Execution& execution, Matrix<const float> a, Matrix<const float> b, double weight,
                        double error, Array<double> norms, Array<double> parts) {
  const std::int64_t n_parts = square_parts(a.columns);
  for_teams(
      execution, "add_inner_products", a.rows * n_parts, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t part = team.league_rank(), first = part % n_parts * kSquareBlock;
        const float *left = a.row(part / n_parts) + first, *right = b.row(part / n_parts) + first;
        const double sum = sum_columns<double>(team, smaller(kSquareBlock, a.columns - first), [&](int i) {
          return at_most(static_cast<double>(left[i]) * static_cast<double>(right[i]), error);
        });
        once(team, [&] { parts[part] = sum; });
      });
  kernels::add_parts(execution, n_parts, weight, norms, parts);
}

void sum_example_columns(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                         Array<const float> scale, Array<const std::int64_t> offsets, Matrix<float> sums) {
  const std::int64_t chunks = (g.columns + kChunkColumns - 1) / kChunkColumns;
  for_teams(
      execution, "sum_example_columns", sums.rows * chunks, sizeof(ExampleColumnScratch),
      KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t e = team.league_rank() / chunks, column = team.league_rank() % chunks * kChunkColumns;
        const int count = smaller(kChunkColumns, g.columns - column);
        ExampleColumnScratch& buffer = scratch<ExampleColumnScratch>(team);
        for_columns(team, count, [&](int c) { buffer.total[c] = 0.0f; });
        // Sums of kRowsPerSum rows, then of those: the error grows with the root of the number of rows at most.
        for (std::int64_t begin = offsets[e]; begin < offsets[e + 1]; begin += kRowsPerSum) {
          const std::int64_t end = begin + smaller(kRowsPerSum, offsets[e + 1] - begin);
          for_columns(team, count, [&](int c) { buffer.block[c] = 0.0f; });
          for (std::int64_t n = begin; n < end; ++n) {
            const float* gradient = row_chunk(team, g, n, column, count, buffer.g);
            if (x.data == nullptr) {
              for_columns(team, count, [&](int c) { buffer.block[c] += gradient[c]; });
            } else {
              const float* value = row_chunk(team, x, n, column, count, buffer.x);
              const float less = shift.data == nullptr ? 0.0f : shift[n],
                          times = scale.data == nullptr ? 1.0f : scale[n];
              for_columns(team, count, [&](int c) { buffer.block[c] += (value[c] - less) * times * gradient[c]; });
            }
          }
          for_columns(team, count, [&](int c) { buffer.total[c] += buffer.block[c]; });
        }
        for_columns(team, count, [&](int c) { sums(e, column + c) = buffer.total[c]; });
      });
}

}  // namespace portable
}  // namespace weft::kernels
