// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. Every value is read once, where rows are aligned 8 columns at a time. A block of 256 threads forms one
// part of kSquareBlock values; another kernel adds the parts of a row. Column sums read several rows before they add
// them: 1.9 to 4.4 TB/s on an H200, which copies at 3.9.
#include "kernels/language/rows_cuda.cuh"
#include "kernels/matrix_cuda.cuh"
#include "kernels/privacy/example_sums.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kEach = static_cast<int>(kSquareBlock) / kThreads;

/// Sum over the block in a fixed order, on thread 0.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double part[kWarps];
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = value;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0)
    for (int w = 0; w < kWarps; ++w) total += part[w];
  return total;
}

/// Sums term(row, i) over every kWidth adjacent values from i on that this thread has in the part of the block; the
/// part's sum goes to `parts`. `columns` is a multiple of kWidth.
template <int kWidth, class Term>
__device__ __forceinline__ void sum_part(std::int64_t columns, double* parts, const Term& term) {
  const std::int64_t n_parts = square_parts(columns), row = blockIdx.x / n_parts;
  const std::int64_t first = blockIdx.x % n_parts * kSquareBlock + threadIdx.x * kWidth;
  double sum = 0;
#pragma unroll
  for (int k = 0; k < kEach / kWidth; ++k)
    if (first + k * kThreads * kWidth < columns) sum += term(row, first + k * kThreads * kWidth);
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads) square_values(const __grid_constant__ AnyMatrix values, double* parts) {
  sum_part<kWidth>(values.columns, parts, [&](std::int64_t row, std::int64_t i) {
    float value[kWidth];
    load_columns(values, row, i, value);
    double sum = 0;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum += static_cast<double>(value[k]) * static_cast<double>(value[k]);
    return sum;
  });
}

/// Block b: norms[b] += weight * sum over the parts of b.
__global__ void __launch_bounds__(kThreads)
    sum_parts(std::int64_t n_parts, double weight, double* norms, const double* parts) {
  double sum = 0;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < n_parts; i += kThreads) sum += parts[blockIdx.x * n_parts + i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) norms[blockIdx.x] += weight * sum;
}

__global__ void __launch_bounds__(kThreads)
    multiply_values(const __grid_constant__ Matrix<const float> a, const __grid_constant__ Matrix<const float> b,
                    double error, double* parts) {
  sum_part<1>(a.columns, parts, [&](std::int64_t row, std::int64_t i) {
    return at_most(static_cast<double>(a(row, i)) * static_cast<double>(b(row, i)), error);
  });
}

/// A thread has kWidth adjacent elements of the sum.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) weigh_values(const __grid_constant__ AnyMatrix values, const float* factors,
                                                         const __grid_constant__ AnyMatrix out) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (i >= values.columns) return;
  const std::int64_t row = i / out.columns, column = i % out.columns;
  float sum[kWidth];
  load_columns(out, row, column, sum);
#pragma unroll 8
  for (std::int64_t b = 0; b < values.rows; ++b) {
    const float factor = factors[b];
    float value[kWidth];
    load_columns(values, b, i, value);
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (factor != 0.0f) sum[k] += factor * value[k];
  }
  store_columns(out, row, column, sum);
}

struct ExampleColumns {
  AnyMatrix x, g;  // x without data: sums of g
  const float *shift, *scale;
  const std::int64_t* offsets;
  Matrix<float> sums;
};

/// Number of columns of a block.
constexpr int kBlockColumns = 64;

/// Adds what the threads of a block have of its columns: thread t from column t % kLanes * kWidth on, of the rows t /
/// kLanes, t / kLanes + kThreads / kLanes, …
template <int kWidth>
__device__ __forceinline__ void add_row_lanes(const ExampleColumns& a, std::int64_t e, std::int64_t block_column,
                                              const float (&total)[kWidth]) {
  constexpr int kLanes = kBlockColumns / kWidth, kRowLanes = kThreads / kLanes;
  __shared__ float part[kRowLanes][kBlockColumns + 1];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) part[threadIdx.x / kLanes][threadIdx.x % kLanes * kWidth + i] = total[i];
  __syncthreads();
  const int c = static_cast<int>(threadIdx.x);
  if (c >= kBlockColumns || block_column + c >= a.g.columns) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int r = 0; r < kRowLanes; ++r) sum += part[r][c];
  a.sums(e, block_column + c) = sum;
}

/// Block (b, c), c first: kBlockColumns columns of example b.
__global__ void __launch_bounds__(kThreads) sum_columns(const __grid_constant__ ExampleColumns a) {
  constexpr int kRowLanes = kThreads / kBlockColumns;
  const std::int64_t across = (a.g.columns + kBlockColumns - 1) / kBlockColumns;
  const std::int64_t e = blockIdx.x / across, end = a.offsets[e + 1];
  const std::int64_t block_column = blockIdx.x % across * kBlockColumns,
                     column = block_column + threadIdx.x % kBlockColumns;
  // Sums of 16 rows, then of those: their error grows with a sixteenth of the rows.
  constexpr int kRows = 16;
  float total[1] = {};
  if (column < a.g.columns)
    for (std::int64_t first = a.offsets[e] + threadIdx.x / kBlockColumns; first < end; first += kRows * kRowLanes) {
      float sum = 0.0f;
      for (std::int64_t row = first; row < min(end, first + kRows * kRowLanes); row += kRowLanes) {
        float g[1];
        load_columns(a.g, row, column, g);
        if (a.x.data != nullptr) {
          float x[1];
          load_columns(a.x, row, column, x);
          g[0] *= (x[0] - (a.shift == nullptr ? 0.0f : a.shift[row])) * (a.scale == nullptr ? 1.0f : a.scale[row]);
        }
        sum += g[0];
      }
      total[0] += sum;
    }
  add_row_lanes(a, e, block_column, total);
}

/// Sums of the columns of G alone, eight adjacent columns per thread. A thread reads several rows before it adds them:
/// that keeps enough reads in flight.
template <bool kWide>
__global__ void __launch_bounds__(kThreads) sum_vectors(const __grid_constant__ ExampleColumns a) {
  constexpr int kLanes = kBlockColumns / 8, kRowLanes = kThreads / kLanes, kRows = 8;
  const std::int64_t across = (a.g.columns + kBlockColumns - 1) / kBlockColumns;
  const std::int64_t e = blockIdx.x / across, end = a.offsets[e + 1];
  const std::int64_t block_column = blockIdx.x % across * kBlockColumns,
                     column = block_column + threadIdx.x % kLanes * 8;
  float total[8] = {};
  if (column < a.g.columns)
    for (std::int64_t first = a.offsets[e] + threadIdx.x / kLanes; first < end; first += kRows * kRowLanes) {
      StoredColumns<kWide> g[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) g[k].load(a.g, min(first + k * kRowLanes, end - 1), column);
      float sum[8] = {};
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        float value[8];
        g[k].values(a.g.type, value);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += first + k * kRowLanes < end ? value[i] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) total[i] += sum[i];
    }
  add_row_lanes(a, e, block_column, total);
}

unsigned parts_of(std::int64_t rows, std::int64_t columns) {
  return static_cast<unsigned>(rows * square_parts(columns));
}

}  // namespace

void add_parts(const Execution& execution, std::int64_t n_parts, double weight, Array<double> norms,
               Array<const double> parts) {
  if (norms.size == 0) return;
  sum_parts<<<static_cast<unsigned>(norms.size), kThreads, 0, stream_of(execution)>>>(n_parts, weight, norms.data,
                                                                                      parts.data);
  require_launch("add_parts");
}

void add_squares(const Execution& execution, AnyMatrix values, Array<double> norms, Array<double> parts) {
  if (values.rows == 0 || values.columns == 0) return;
  const unsigned blocks = parts_of(values.rows, values.columns);
  const cudaStream_t queue = stream_of(execution);
  if (values.columns % 8 == 0 && has_vectors(values))
    square_values<8><<<blocks, kThreads, 0, queue>>>(values, parts.data);
  else
    square_values<1><<<blocks, kThreads, 0, queue>>>(values, parts.data);
  require_launch("add_squares");
  kernels::add_parts(execution, square_parts(values.columns), 1, norms, parts);
}

void add_weighed(const Execution& execution, AnyMatrix values, Array<const float> factors, Matrix<float> out) {
  if (values.columns == 0) return;
  const AnyMatrix to{out.data, Scalar::fp32, out.rows, out.columns, out.stride};
  const cudaStream_t queue = stream_of(execution);
  if (out.columns % 8 == 0 && has_vectors(values) && has_vectors(to))
    weigh_values<8><<<blocks_for(values.columns, kThreads * 8), kThreads, 0, queue>>>(values, factors.data, to);
  else
    weigh_values<1><<<blocks_for(values.columns, kThreads), kThreads, 0, queue>>>(values, factors.data, to);
  require_launch("add_weighed");
}

void add_inner_products(const Execution& execution, Matrix<const float> a, Matrix<const float> b, double weight,
                        double error, Array<double> norms, Array<double> parts) {
  if (a.rows == 0 || a.columns == 0) return;
  multiply_values<<<parts_of(a.rows, a.columns), kThreads, 0, stream_of(execution)>>>(a, b, error, parts.data);
  require_launch("add_inner_products");
  kernels::add_parts(execution, square_parts(a.columns), weight, norms, parts);
}

void sum_example_columns(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                         Array<const float> scale, Array<const std::int64_t> offsets, Matrix<float> sums) {
  if (sums.rows == 0 || g.columns == 0) return;
  const ExampleColumns a{x, g, shift.data, scale.data, offsets.data, sums};
  const unsigned grid = static_cast<unsigned>(sums.rows) * blocks_for(g.columns, kBlockColumns);
  const cudaStream_t queue = stream_of(execution);
  if (x.data != nullptr || g.columns % 8 != 0 || !has_vectors(g))
    sum_columns<<<grid, kThreads, 0, queue>>>(a);
  else if (g.type == Scalar::fp32)
    sum_vectors<true><<<grid, kThreads, 0, queue>>>(a);
  else
    sum_vectors<false><<<grid, kThreads, 0, queue>>>(a);
  require_launch("sum_example_columns");
}

}  // namespace weft::kernels::cuda
