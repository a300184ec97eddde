// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. A row is read once, held in registers by a warp (up to 1,024 columns) or a block of 256 threads, and
// written once. Bytes per row of C columns in bf16: forward with residual 8 C (x, addend, sum, y), without 4 C;
// backward 8 C (h, dy, dh read and written), overwriting 6 C. Weights come from the first-level cache.
//
// Rows of more than 8,192 columns, or that cannot be read 16 bytes at a time, take the portable kernels.
#include "kernels/language/norm/norm.hpp"
#include "kernels/language/rows_cuda.cuh"

namespace weft::kernels {

namespace portable {
decltype(kernels::norm_forward) norm_forward;
decltype(kernels::norm_backward) norm_backward;
}  // namespace portable

namespace cuda {
namespace {

struct Forward {
  bool centred;
  float epsilon;
  const float *weight, *bias;
  AnyMatrix x, addend, sum, y;
  float *mean, *inverse;
};

template <int kThreads, int kVectors>
__global__ void __launch_bounds__(256) forward(const __grid_constant__ Forward a) {
  const std::int64_t row = row_of_thread<kThreads>();
  if (row >= a.x.rows) return;
  const int thread = static_cast<int>(threadIdx.x % kThreads);
  const float columns = static_cast<float>(a.x.columns);
  float h[kVectors][8];
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t column = (v * kThreads + thread) * 8;
    if (column >= a.x.columns) continue;
    load_columns(a.x, row, column, h[v]);
    if (a.addend.data != nullptr) {
      float addend[8];
      load_columns(a.addend, row, column, addend);
#pragma unroll
      for (int i = 0; i < 8; ++i) h[v][i] += addend[i];
      store_columns(a.sum, row, column, h[v]);
      round_as(a.sum.type, h[v]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += h[v][i];
  }
  const float mean = a.centred ? row_sum<kThreads>(sum) / columns : 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if ((v * kThreads + thread) * 8 >= a.x.columns) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += (h[v][i] - mean) * (h[v][i] - mean);
  }
  const float inverse = 1.0f / sqrtf(row_sum<kThreads>(squares) / columns + a.epsilon);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t column = (v * kThreads + thread) * 8;
    if (column >= a.x.columns) continue;
    float weight[8], bias[8] = {};
    load_shared_by_rows(a.weight + column, weight);
    if (a.bias != nullptr) load_shared_by_rows(a.bias + column, bias);
#pragma unroll
    for (int i = 0; i < 8; ++i) h[v][i] = weight[i] * ((h[v][i] - mean) * inverse) + bias[i];
    store_columns(a.y, row, column, h[v]);
  }
  if (thread == 0) {
    if (a.mean != nullptr) a.mean[row] = mean;
    a.inverse[row] = inverse;
  }
}

struct Backward {
  bool centred, overwrite;
  const float* weight;
  AnyMatrix h, dy, dh;
  const float *mean, *inverse;
};

template <int kThreads, int kVectors>
__global__ void __launch_bounds__(256) backward(const __grid_constant__ Backward a) {
  const std::int64_t row = row_of_thread<kThreads>();
  if (row >= a.h.rows) return;
  const int thread = static_cast<int>(threadIdx.x % kThreads);
  const float columns = static_cast<float>(a.h.columns);
  const float mean = a.centred ? a.mean[row] : 0.0f, inverse = a.inverse[row];
  float xhat[kVectors][8], g[kVectors][8];  // g = weight * dy
  float sum = 0.0f, product = 0.0f;         // of g, and of g * xhat
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t column = (v * kThreads + thread) * 8;
    if (column >= a.h.columns) continue;
    float weight[8];
    load_columns(a.h, row, column, xhat[v]);
    load_columns(a.dy, row, column, g[v]);
    load_shared_by_rows(a.weight + column, weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      xhat[v][i] = (xhat[v][i] - mean) * inverse;
      g[v][i] *= weight[i];
      sum += g[v][i];
      product += g[v][i] * xhat[v][i];
    }
  }
  const float mean_g = a.centred ? row_sum<kThreads>(sum) / columns : 0.0f;
  const float mean_product = row_sum<kThreads>(product) / columns;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t column = (v * kThreads + thread) * 8;
    if (column >= a.h.columns) continue;
    float before[8] = {};
    if (!a.overwrite) load_columns(a.dh, row, column, before);
#pragma unroll
    for (int i = 0; i < 8; ++i) before[i] += inverse * (g[v][i] - mean_g - xhat[v][i] * mean_product);
    store_columns(a.dh, row, column, before);
  }
}

bool in_registers(std::int64_t columns, const NormWeights& weights) {
  return columns <= kMostRegisterColumns && is_aligned(weights.weight.data, 16) && is_aligned(weights.bias.data, 16);
}

}  // namespace

void norm_forward(const Execution& execution, const NormWeights& weights, AnyMatrix x, AnyMatrix addend, AnyMatrix sum,
                  AnyMatrix y, const NormStatistics& statistics) {
  if (addend.data == nullptr) sum = {};
  if (!vectors_fit(x.columns, x, addend, sum, y) || !in_registers(x.columns, weights))
    return portable::norm_forward(execution, weights, x, addend, sum, y, statistics);
  const Forward a{
      weights.kind == Norm::layer, weights.epsilon,        weights.weight.data, weights.bias.data, x, addend, sum, y,
      statistics.mean.data,        statistics.inverse.data};
  launch_rows(x.rows, x.columns, [&]<int kThreads, int kVectors>(unsigned blocks, unsigned threads) {
    forward<kThreads, kVectors><<<blocks, threads, 0, stream_of(execution)>>>(a);
  });
  require_launch("norm_forward");
}

void norm_backward(const Execution& execution, const NormWeights& weights, AnyMatrix h,
                   const NormStatistics& statistics, AnyMatrix dy, AnyMatrix dh, bool overwrite) {
  if (!vectors_fit(h.columns, h, dy, dh) || !in_registers(h.columns, weights))
    return portable::norm_backward(execution, weights, h, statistics, dy, dh, overwrite);
  const Backward a{weights.kind == Norm::layer, overwrite, weights.weight.data, h, dy, dh, statistics.mean.data,
                   statistics.inverse.data};
  launch_rows(h.rows, h.columns, [&]<int kThreads, int kVectors>(unsigned blocks, unsigned threads) {
    backward<kThreads, kVectors><<<blocks, threads, 0, stream_of(execution)>>>(a);
  });
  require_launch("norm_backward");
}

}  // namespace cuda
}  // namespace weft::kernels
