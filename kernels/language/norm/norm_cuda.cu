// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. A row is read once, held in registers by a warp (up to 1,024 columns) or a block of 256 threads, and
// written once. Bytes per row of C columns in bf16: forward with residual 8 C (x, addend, sum, y), without 4 C;
// backward 8 C (h, dy, dh read and written), overwriting 6 C, and 12 C per block of rows for its sums. Weights come
// from the first-level cache. Few rows have a block each: then the limit is the latency of one read.
//
// Backward, a thread owns 8 columns (16 from 4,096 columns on) of all rows of its block and keeps their sums in
// registers; the next row is read while this one is computed.
//
// Rows of more than 8,192 columns, or that cannot be read 16 bytes at a time, take the portable kernels.
#include "kernels/language/norm/norm.hpp"
#include "kernels/language/rows_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/slow_paths.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr std::int64_t kFewRows = 512;  ///< of a block each: a step of generation, not of training

struct Forward {
  bool centred;
  float epsilon;
  const float *weight, *bias;
  AnyMatrix x, addend, sum, y;
  float *mean, *inverse;
};

/// kFew: rows that do not fill the GPU, where latency counts: the weights are read before the kernel before this one
/// has ended. Same bits.
template <int kThreads, int kVectors, bool kFew>
__global__ void __launch_bounds__(256) forward(const __grid_constant__ Forward a) {
  const std::int64_t row = row_of_thread<kThreads>();
  const int thread = static_cast<int>(threadIdx.x % kThreads);
  const auto column_of = [&](int v) -> std::int64_t { return (v * kThreads + thread) * 8; };
  float weight[kVectors][8], bias[kVectors][8] = {};
  const auto load_weights = [&](int v) {
    load_shared_by_rows(a.weight + column_of(v), weight[v]);
    if (a.bias != nullptr) load_shared_by_rows(a.bias + column_of(v), bias[v]);
  };
  if constexpr (kFew) {
    allow_next_kernel();
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (column_of(v) < a.x.columns) load_weights(v);
    await_previous_kernel();
  }
  if (row >= a.x.rows) return;
  const float columns = static_cast<float>(a.x.columns);
  float h[kVectors][8], addend[kVectors][8];
  // All reads before the first write, which the compiler would not move them across.
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column_of(v) >= a.x.columns) continue;
    load_columns(a.x, row, column_of(v), h[v]);
    if (a.addend.data != nullptr) load_columns(a.addend, row, column_of(v), addend[v]);
  }
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column_of(v) >= a.x.columns) continue;
    if (a.addend.data != nullptr) {
#pragma unroll
      for (int i = 0; i < 8; ++i) h[v][i] += addend[v][i];
      store_columns(a.sum, row, column_of(v), h[v]);
      round_as(a.sum.type, h[v]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += h[v][i];
  }
  const float mean = a.centred ? row_sum<kThreads>(sum) / columns : 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column_of(v) >= a.x.columns) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += (h[v][i] - mean) * (h[v][i] - mean);
  }
  const float inverse = 1.0f / sqrtf(row_sum<kThreads>(squares) / columns + a.epsilon);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column_of(v) >= a.x.columns) continue;
    if constexpr (!kFew) load_weights(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) h[v][i] = weight[v][i] * ((h[v][i] - mean) * inverse) + bias[v][i];
    store_columns(a.y, row, column_of(v), h[v]);
  }
  if (thread == 0) {
    if (a.mean != nullptr) a.mean[row] = mean;
    a.inverse[row] = inverse;
  }
}

struct Backward {
  bool centred;
  const float* weight;
  AnyMatrix h, dy, addend, dh;
  const float *mean, *inverse;
  NormSums sums;
};

constexpr int kMostBackwardThreads = 512;

/// Two sums over the threads of a block. `part`: [warps], other memory than in the call before.
__device__ __forceinline__ float2 block_sums(float2 value, float2* part) {
  value.x = warp_sum(value.x);
  value.y = warp_sum(value.y);
  if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = {0.0f, 0.0f};
  for (unsigned w = 0; w < blockDim.x / kWarp; ++w) {
    value.x += part[w].x;
    value.y += part[w].y;
  }
  return value;
}

/// kVectors: groups of 8 columns of a thread.
template <int kVectors>
__global__ void __launch_bounds__(kMostBackwardThreads) backward(const __grid_constant__ Backward a) {
  __shared__ float2 part[2][kMostBackwardThreads / kWarp];
  const std::int64_t begin = a.sums.blocks.begin(blockIdx.x), end = a.sums.blocks.end(blockIdx.x, a.h.rows);
  const float columns = static_cast<float>(a.h.columns);
  const auto column_of = [](int v) -> std::int64_t { return (v * blockDim.x + threadIdx.x) * 8; };
  StoredColumns<false> h[kVectors], dy[kVectors], addend[kVectors];
  float mean = 0.0f, inverse = 0.0f;
  const auto load = [&](std::int64_t row) {
    if (a.centred) mean = a.mean[row];
    inverse = a.inverse[row];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= a.h.columns) continue;
      h[v].load(a.h, row, column_of(v));
      dy[v].load(a.dy, row, column_of(v));
      if (a.addend.data != nullptr) addend[v].load(a.addend, row, column_of(v));
    }
  };
  float weight_sum[kVectors][8] = {}, bias_sum[kVectors][8] = {}, input_sum[kVectors][8] = {};
  load(begin);
  for (std::int64_t row = begin; row < end; ++row) {
    float xhat[kVectors][8], g[kVectors][8];
    StoredColumns<false> before[kVectors];
    const float scale = inverse;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= a.h.columns) continue;
      h[v].values(a.h.type, xhat[v]);
      dy[v].values(a.dy.type, g[v]);
      before[v] = addend[v];
#pragma unroll
      for (int i = 0; i < 8; ++i) xhat[v][i] = (xhat[v][i] - mean) * scale;
    }
    if (row + 1 < end) load(row + 1);
    float2 total{0.0f, 0.0f};  // of a = weight * dy, and of a * xhat
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= a.h.columns) continue;
      float weight[8];
      load_shared_by_rows(a.weight + column_of(v), weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        weight_sum[v][i] += g[v][i] * xhat[v][i];
        bias_sum[v][i] += g[v][i];
        g[v][i] *= weight[i];
        total.x += g[v][i];
        total.y += g[v][i] * xhat[v][i];
      }
    }
    total = block_sums(total, part[(row - begin) % 2]);
    const float mean_g = a.centred ? total.x / columns : 0.0f, mean_product = total.y / columns;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= a.h.columns) continue;
      float sum[8] = {};
      if (a.addend.data != nullptr) before[v].values(a.addend.type, sum);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += scale * (g[v][i] - mean_g - xhat[v][i] * mean_product);
      store_columns(a.dh, row, column_of(v), sum);
      round_as(a.dh.type, sum);
#pragma unroll
      for (int i = 0; i < 8; ++i) input_sum[v][i] += sum[i];
    }
  }
  const auto store = [&](const Matrix<float>& to, const float(&sum)[kVectors][8]) {
    if (to.data == nullptr) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= a.h.columns) continue;
      float4* const out = reinterpret_cast<float4*>(to.row(blockIdx.x) + column_of(v));
      out[0] = make_float4(sum[v][0], sum[v][1], sum[v][2], sum[v][3]);
      out[1] = make_float4(sum[v][4], sum[v][5], sum[v][6], sum[v][7]);
    }
  };
  store(a.sums.weight, weight_sum);
  store(a.sums.bias, bias_sum);
  store(a.sums.input, input_sum);
}

bool in_registers(std::int64_t columns, const NormWeights& weights) {
  static_assert(kMostNormColumns == kMostRegisterColumns);
  return columns <= kMostNormColumns && is_aligned(weights.weight.data, 16) && is_aligned(weights.bias.data, 16);
}

bool has_vectors(const Matrix<float>& sums) { return sums.stride % 4 == 0 && is_aligned(sums.data, 16); }

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
    if (x.rows <= kFewRows)
      return launch_early<Forward>(execution, "norm_forward", forward<kThreads, kVectors, true>,
                                   dim3(static_cast<unsigned>(x.rows)), kThreads, 0, 1, a);
    forward<kThreads, kVectors, false><<<blocks, threads, 0, stream_of(execution)>>>(a);
    require_launch("norm_forward");
  });
}

void norm_backward(const Execution& execution, const NormWeights& weights, AnyMatrix h,
                   const NormStatistics& statistics, AnyMatrix dy, AnyMatrix addend, AnyMatrix dh,
                   const NormSums& sums) {
  const auto is_narrow = [](const AnyMatrix& rows) { return rows.data == nullptr || bytes_of(rows.type) == 2; };
  if (!vectors_fit(h.columns, h, dy, addend, dh) || !in_registers(h.columns, weights) || !is_narrow(h) ||
      !is_narrow(dy) || !is_narrow(addend) || !has_vectors(sums.weight) || !has_vectors(sums.bias) ||
      !has_vectors(sums.input))
    return portable::norm_backward(execution, weights, h, statistics, dy, addend, dh, sums);
  if (h.rows == 0) return;
  Backward a{weights.kind == Norm::layer, weights.weight.data,     h,   dy, addend, dh,
             statistics.mean.data,        statistics.inverse.data, sums};
  if (a.sums.blocks.length == 0) a.sums.blocks = NormBlocks::of(h.rows);
  const std::int64_t threads = (h.columns / 8 + kWarp - 1) / kWarp * kWarp;
  const auto launch = [&]<int kVectors>() {
    const unsigned blocks = static_cast<unsigned>(a.sums.blocks.count(h.rows)),
                   of_block = static_cast<unsigned>(kVectors == 1 ? threads : kMostBackwardThreads);
    backward<kVectors><<<blocks, of_block, 0, stream_of(execution)>>>(a);
  };
  if (threads <= kMostBackwardThreads)
    launch.template operator()<1>();
  else
    launch.template operator()<2>();
  require_launch("norm_backward");
}

}  // namespace weft::kernels::cuda
