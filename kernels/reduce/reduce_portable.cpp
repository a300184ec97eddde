// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <type_traits>

#include "kernels/portable.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::kernels {
namespace {

template <class T>
void reconstruct_as(const Execution& execution, AnyMatrix partial, std::int64_t n_parts, Array<const float> bias,
                    Matrix<float> out) {
  const Matrix<const T> parts{static_cast<const T*>(partial.data), partial.rows, partial.columns, partial.stride};
  for_all(
      execution, "reconstruct", out.rows, KOKKOS_LAMBDA(std::int64_t n) {
        for (std::int64_t j = 0; j < out.columns; ++j) {
          float sum = static_cast<float>(parts(n, j));
          for (std::int64_t p = 1; p < n_parts; ++p) sum += static_cast<float>(parts(p * out.rows + n, j));
          out(n, j) = sum + bias[j];
        }
      });
}

template <class T>
void sum_parts_as(const Execution& execution, AnyMatrix partial, std::int64_t n_parts, AnyMatrix out) {
  const Matrix<const T> parts{static_cast<const T*>(partial.data), partial.rows, partial.columns, partial.stride};
  const Matrix<T> sums{static_cast<T*>(out.data), out.rows, out.columns, out.stride};
  for_all(
      execution, "sum_parts", out.rows * out.columns, KOKKOS_LAMBDA(std::int64_t element) {
        const std::int64_t n = element / sums.columns, j = element % sums.columns;
        float sum = static_cast<float>(parts(n, j));
        for (std::int64_t p = 1; p < n_parts; ++p) sum += static_cast<float>(parts(p * sums.rows + n, j));
        if constexpr (std::is_same_v<T, bf16>)
          sums(n, j) = to_bf16(sum);
        else if constexpr (std::is_same_v<T, half>)
          sums(n, j) = to_half(sum);
        else
          sums(n, j) = sum;
      });
}

}  // namespace

namespace portable {

void sum_parts(const Execution& execution, AnyMatrix parts, std::int64_t n_parts, AnyMatrix out) {
  if (out.type == Scalar::bf16)
    sum_parts_as<bf16>(execution, parts, n_parts, out);
  else if (out.type == Scalar::fp16)
    sum_parts_as<half>(execution, parts, n_parts, out);
  else
    sum_parts_as<float>(execution, parts, n_parts, out);
}

}  // namespace portable

void reconstruct(const Execution& execution, AnyMatrix partial, std::int64_t n_parts, Array<const float> bias,
                 Matrix<float> out) {
  if (partial.type == Scalar::bf16)
    reconstruct_as<bf16>(execution, partial, n_parts, bias, out);
  else
    reconstruct_as<float>(execution, partial, n_parts, bias, out);
}

void keep_largest(const Execution& execution, Matrix<const float> rows, float sign, std::int64_t first,
                  std::int64_t self, LargestOfRows largest) {
  const std::int64_t k = largest.value.columns;
  if (k == 0) return;
  for_teams(
      execution, "keep_largest", rows.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        float* const value = largest.value.row(row);
        std::int64_t* const index = largest.index.row(row);
        constexpr float kLeast = -std::numeric_limits<float>::infinity();
        for_chunks(rows.columns, rows.columns, [&](std::int64_t column, int count) {
          const float* const chunk = rows.row(row) + column;
          // Few chunks have one of the largest; the others are read once, by all lanes.
          team.team_barrier();
          if (index[k - 1] >= 0 &&
              max_columns(team, count, kLeast, [&](int c) { return sign * chunk[c]; }) <= value[k - 1])
            return;
          once(team, [&] {
            for (int c = 0; c < count; ++c) {
              const float candidate = sign * chunk[c];
              const std::int64_t of_column = first + column + c;
              if (of_column == self + row || candidate != candidate) continue;
              std::int64_t at = k;
              for (; at > 0 && (index[at - 1] < 0 || candidate > value[at - 1]); --at)
                if (at < k) value[at] = value[at - 1], index[at] = index[at - 1];
              if (at < k) value[at] = candidate, index[at] = of_column;
            }
          });
        });
      });
}

void sum_rows(const Execution& execution, Matrix<const float> rows, Array<float> out) {
  for_all(
      execution, "sum_rows", out.size, KOKKOS_LAMBDA(std::int64_t j) {
        float sum = 0;
        for (std::int64_t i = 0; i < rows.rows; ++i) sum += rows(i, j);
        out[j] = sum;
      });
}

void add_row_norms(const Execution& execution, Matrix<const float> matrix, Array<double> out) {
  for_all(
      execution, "add_row_norms", matrix.rows, KOKKOS_LAMBDA(std::int64_t i) {
        double sum = 0;
        for (std::int64_t j = 0; j < matrix.columns; ++j) {
          const double value = static_cast<double>(matrix(i, j));
          sum += value * value;
        }
        out[i] += sum;
      });
}

void accumulate(const Execution& execution, Array<const double> from, Array<double> into) {
  for_all(
      execution, "accumulate", from.size, KOKKOS_LAMBDA(std::int64_t i) { into[i] += from[i]; });
}

void accumulate_layer_counts(const Execution& execution, Array<const std::int64_t> hit_offsets, std::int64_t n_features,
                             Array<double> counts) {
  for_all(
      execution, "accumulate_layer_counts", counts.size, KOKKOS_LAMBDA(std::int64_t layer) {
        counts[layer] += static_cast<double>(hit_offsets[(layer + 1) * n_features] - hit_offsets[layer * n_features]);
      });
}

void count_at_least(const Execution& execution, Array<const std::int64_t> values, std::int64_t bound,
                    std::int64_t* out) {
  // One thread: called only for logged steps, and integer atomics would need a cleared counter first.
  for_all(
      execution, "count_at_least", 1, KOKKOS_LAMBDA(std::int64_t) {
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < values.size; ++i) count += values[i] >= bound ? 1 : 0;
        *out = count;
      });
}

namespace {

template <class T>
void total_of(const Execution& execution, Array<const T> values, Array<double> workspace, double* out) {
  const std::int64_t n_blocks = total_workspace(values.size);
  for_all(
      execution, "total_blocks", n_blocks, KOKKOS_LAMBDA(std::int64_t block) {
        double sum = 0;
        const std::int64_t end = (block + 1) * kTotalBlock < values.size ? (block + 1) * kTotalBlock : values.size;
        for (std::int64_t i = block * kTotalBlock; i < end; ++i) sum += static_cast<double>(values[i]);
        workspace[block] = sum;
      });
  for_all(
      execution, "total", 1, KOKKOS_LAMBDA(std::int64_t) {
        double sum = 0;
        for (std::int64_t block = 0; block < n_blocks; ++block) sum += workspace[block];
        *out = sum;
      });
}

}  // namespace

void total(const Execution& execution, Array<const double> values, Array<double> workspace, double* out) {
  total_of(execution, values, workspace, out);
}

void total(const Execution& execution, Array<const float> values, Array<double> workspace, double* out) {
  total_of(execution, values, workspace, out);
}

}  // namespace weft::kernels
