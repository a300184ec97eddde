// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. Every value is read once, with 16 loads of a thread in flight. A block of 256 threads forms one part
// of kSquareBlock values; the sums over the parts are portable (add_parts). Not measured.
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

/// term(row, i) for the values of this thread in the part of the block; the part's sum goes to `parts`.
template <class Term>
__device__ __forceinline__ void sum_part(std::int64_t columns, double* parts, const Term& term) {
  const std::int64_t n_parts = square_parts(columns), row = blockIdx.x / n_parts;
  const std::int64_t first = blockIdx.x % n_parts * kSquareBlock + threadIdx.x;
  double sum = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (first + k * kThreads < columns) sum += term(row, first + k * kThreads);
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) square_values(const __grid_constant__ AnyMatrix values, double* parts) {
  sum_part(values.columns, parts, [&](std::int64_t row, std::int64_t i) {
    const double value = static_cast<double>(load_element(values.data, values.type, row * values.stride + i));
    return value * value;
  });
}

__global__ void __launch_bounds__(kThreads) store_values(const __grid_constant__ Matrix<const float> values,
                                                         const __grid_constant__ Matrix<bf16> to, double* parts) {
  sum_part(values.columns, parts, [&](std::int64_t row, std::int64_t i) {
    const bf16 rounded = to_bf16(values(row, i));
    to(row, i) = rounded;
    const double value = static_cast<double>(static_cast<float>(rounded));
    return value * value;
  });
}

__global__ void __launch_bounds__(kThreads)
    multiply_values(const __grid_constant__ Matrix<const float> a, float shift,
                    const __grid_constant__ Matrix<const float> b, double error, double* parts) {
  sum_part(a.columns, parts, [&](std::int64_t row, std::int64_t i) {
    return at_most((static_cast<double>(a(row, i)) + static_cast<double>(shift)) * static_cast<double>(b(row, i)),
                   error);
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
#pragma unroll 4
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

/// Block (b, c): example b; warp w takes rows w, w + kWarps, ...; lanes have kWidth columns each.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) sum_columns(const __grid_constant__ ExampleColumns a) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const std::int64_t e = blockIdx.x, end = a.offsets[e + 1];
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * kWarp + lane) * kWidth;
  // Sums of 16 rows, then of those: their error grows with a sixteenth of the rows.
  constexpr int kRows = 16;
  float total[kWidth] = {};
  if (column < a.g.columns)
    for (std::int64_t first = a.offsets[e] + warp; first < end; first += kRows * kWarps) {
      float sum[kWidth] = {};
#pragma unroll 4
      for (int k = 0; k < kRows; ++k) {
        const std::int64_t row = first + k * kWarps;
        if (row >= end) break;
        float g[kWidth];
        load_columns(a.g, row, column, g);
        if (a.x.data != nullptr) {
          float x[kWidth];
          load_columns(a.x, row, column, x);
          const float shift = a.shift == nullptr ? 0.0f : a.shift[row],
                      scale = a.scale == nullptr ? 1.0f : a.scale[row];
#pragma unroll
          for (int i = 0; i < kWidth; ++i) g[i] *= (x[i] - shift) * scale;
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] += g[i];
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[i] += sum[i];
    }
  __shared__ float part[kWarps][kWarp * kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) part[warp][lane * kWidth + i] = total[i];
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * kWarp * kWidth;
  for (int c = static_cast<int>(threadIdx.x); c < kWarp * kWidth && first + c < a.g.columns; c += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += part[w][c];
    a.sums(e, first + c) = sum;
  }
}

unsigned parts_of(std::int64_t rows, std::int64_t columns) {
  return static_cast<unsigned>(rows * square_parts(columns));
}

}  // namespace

void add_squares(const Execution& execution, AnyMatrix values, Array<double> norms, Array<double> parts) {
  if (values.rows == 0 || values.columns == 0) return;
  square_values<<<parts_of(values.rows, values.columns), kThreads, 0, stream_of(execution)>>>(values, parts.data);
  require_launch("add_squares");
  add_parts(execution, square_parts(values.columns), 1, norms, parts);
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

void store_rounded(const Execution& execution, Matrix<const float> values, Matrix<bf16> to, Array<double> norms,
                   Array<double> parts) {
  if (values.rows == 0 || values.columns == 0) return;
  store_values<<<parts_of(values.rows, values.columns), kThreads, 0, stream_of(execution)>>>(values, to, parts.data);
  require_launch("store_rounded");
  if (norms.data != nullptr) add_parts(execution, square_parts(values.columns), 1, norms, parts);
}

void add_inner_products(const Execution& execution, Matrix<const float> a, float shift, Matrix<const float> b,
                        double weight, double error, Array<double> norms, Array<double> parts) {
  if (a.rows == 0 || a.columns == 0) return;
  multiply_values<<<parts_of(a.rows, a.columns), kThreads, 0, stream_of(execution)>>>(a, shift, b, error, parts.data);
  require_launch("add_inner_products");
  add_parts(execution, square_parts(a.columns), weight, norms, parts);
}

void sum_example_columns(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                         Array<const float> scale, Array<const std::int64_t> offsets, Matrix<float> sums) {
  if (sums.rows == 0 || g.columns == 0) return;
  const ExampleColumns a{x, g, shift.data, scale.data, offsets.data, sums};
  const unsigned examples = static_cast<unsigned>(sums.rows);
  const cudaStream_t queue = stream_of(execution);
  if (g.columns % 8 == 0 && has_vectors(g) && (x.data == nullptr || has_vectors(x)))
    sum_columns<8><<<dim3(examples, blocks_for(g.columns, kWarp * 8)), kThreads, 0, queue>>>(a);
  else
    sum_columns<1><<<dim3(examples, blocks_for(g.columns, kWarp)), kThreads, 0, queue>>>(a);
  require_launch("sum_example_columns");
}

}  // namespace weft::kernels::cuda
