// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. One pass over reconstructions and targets forms residuals, gradient rows and the three sums.
#include <algorithm>

#include "kernels/matrix_cuda.cuh"
#include "kernels/transcoder/loss/loss.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 128;

struct LossArguments {
  AnyMatrix partial, target, gradient_rows;
  std::int64_t n_parts, d_model;
  const float *bias, *centre, *standardise;
  float factor;
  double* sum_of_block;  // [blocks of tokens, L, kLossSums]
};

/// Sums over the threads of a block: thread i gets that of values[i].
template <int n>
__device__ __forceinline__ double block_sum(const double (&values)[n]) {
  __shared__ double of_warp[kThreads / kWarp][n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const double sum = warp_sum(values[i]);
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp][i] = sum;
  }
  __syncthreads();
  double sum = 0.0;
  if (threadIdx.x < n)
    for (unsigned w = 0; w < blockDim.x / kWarp; ++w) sum += of_warp[w][threadIdx.x];
  return sum;
}

/// One block per (8 tokens, layer); threads walk the columns `kWidth` at a time.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 6) residuals(const __grid_constant__ LossArguments a) {
  const std::int64_t n_tokens = a.target.rows;
  const std::int64_t token_begin = static_cast<std::int64_t>(blockIdx.x) * kTokensPerLossSum;
  const std::int64_t token_end = min(token_begin + kTokensPerLossSum, n_tokens);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * a.d_model;
  double sums[kLossSums] = {};
  for (std::int64_t c = threadIdx.x * kWidth; c < a.d_model; c += blockDim.x * kWidth) {
    const std::int64_t column = first + c;
    float bias[kWidth], centre[kWidth], scale[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      bias[i] = a.bias[column + i];
      centre[i] = a.centre[column + i];
      scale[i] = a.standardise[column + i];
    }
    for (std::int64_t token = token_begin; token < token_end; ++token) {
      float residual[kWidth], target[kWidth], part[kWidth];
      load_columns(a.target, token, column, target);
      load_columns(a.partial, token, column, residual);
      for (std::int64_t p = 1; p < a.n_parts; ++p) {
        load_columns(a.partial, p * n_tokens + token, column, part);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) residual[i] += part[i];
      }
      float sum[kLossSums] = {};
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        residual[i] = (residual[i] + bias[i]) - target[i];
        const float error = residual[i] * scale[i], spread = (target[i] - centre[i]) * scale[i];
        sum[0] = fmaf(residual[i], residual[i], sum[0]);
        sum[1] = fmaf(error, error, sum[1]);
        sum[2] = fmaf(spread, spread, sum[2]);
        residual[i] *= a.factor;
      }
      store_columns(a.gradient_rows, token, column, residual);
#pragma unroll
      for (int i = 0; i < kLossSums; ++i) sums[i] += sum[i];
    }
  }
  const double sum = block_sum(sums);
  if (threadIdx.x < kLossSums)
    a.sum_of_block[(static_cast<std::int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * kLossSums + threadIdx.x] = sum;
}

/// Threads of a block, in whole warps, for this number of vectors of columns, with as few idle warps as possible.
unsigned threads_for(std::int64_t vectors) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((vectors + kWarp - 1) / kWarp * kWarp, kWarp, kThreads));
}

/// One block per (layer, sum): threads stride over the blocks of tokens.
__global__ void __launch_bounds__(kThreads)
    finish_sums(const double* sum_of_block, std::int64_t n_blocks, std::int64_t n_layers, LossSums sums) {
  const std::int64_t which = blockIdx.x;
  double own[1] = {};
  for (std::int64_t b = threadIdx.x; b < n_blocks; b += kThreads)
    own[0] += sum_of_block[b * n_layers * kLossSums + which];
  const double sum = block_sum(own);
  if (threadIdx.x != 0) return;
  double* const out[kLossSums] = {sums.squared_error.data, sums.standardised_squared_error.data,
                                  sums.standardised_squared_target.data};
  out[which % kLossSums][which / kLossSums] = sum;
}

// Column sums: a block owns 32 columns and reads 64 rows at a time, 4 lanes of 8 columns each.
constexpr int kOwnColumns = 32, kRowLanes = 64;
template <int kWidth>
__global__ void __launch_bounds__(256) sum_columns(AnyMatrix matrix, float* out) {
  constexpr int kColumnLanes = 256 / kRowLanes;
  __shared__ float total[kRowLanes][kColumnLanes * kWidth + 1];
  const int column_lane = static_cast<int>(threadIdx.x % kColumnLanes),
            row_lane = static_cast<int>(threadIdx.x / kColumnLanes);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * (kColumnLanes * kWidth) + column_lane * kWidth;
  float sum[kWidth] = {};
  if (first < matrix.columns) {
#pragma unroll 8
    for (std::int64_t row = row_lane; row < matrix.rows; row += kRowLanes) {
      float value[kWidth];
      load_columns(matrix, row, first, value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += value[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) total[row_lane][column_lane * kWidth + i] = sum[i];
  __syncthreads();
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * (kColumnLanes * kWidth) + threadIdx.x;
  if (threadIdx.x < kColumnLanes * kWidth && column < matrix.columns) {
    float all = 0.0f;
    for (int r = 0; r < kRowLanes; ++r) all += total[r][threadIdx.x];
    out[column] = all;
  }
}

}  // namespace

void residual_and_loss(const Execution& execution, AnyMatrix partial, std::int64_t n_parts, AnyMatrix target,
                       Array<const float> bias, Array<const float> centre, Array<const float> standardise,
                       std::int64_t n_layers, float gradient_factor, AnyMatrix gradient_rows, LossSums sums,
                       Array<std::byte> workspace) {
  const cudaStream_t queue = stream_of(execution);
  LossArguments a{partial,   target,      gradient_rows,    n_parts,         target.columns / n_layers,
                  bias.data, centre.data, standardise.data, gradient_factor, reinterpret_cast<double*>(workspace.data)};
  const std::int64_t n_blocks = loss_blocks(target.rows);
  if (workspace.size < loss_workspace(target.rows, n_layers))
    throw Error(ExitCode::internal, "residual_and_loss: workspace is smaller than loss_workspace");
  if (n_blocks > 0) {
    const dim3 grid(static_cast<unsigned>(n_blocks), static_cast<unsigned>(n_layers));
    if (a.d_model % 8 == 0 && has_vectors(partial) && has_vectors(target) && has_vectors(gradient_rows))
      residuals<8><<<grid, threads_for(a.d_model / 8), 0, queue>>>(a);
    else
      residuals<1><<<grid, threads_for(a.d_model), 0, queue>>>(a);
  }
  finish_sums<<<static_cast<unsigned>(n_layers * kLossSums), kThreads, 0, queue>>>(a.sum_of_block, n_blocks, n_layers,
                                                                                   sums);
  require_launch("residual_and_loss");
}

void column_sums(const Execution& execution, AnyMatrix matrix, Array<float> out) {
  if (matrix.columns == 0) return;
  const cudaStream_t queue = stream_of(execution);
  if (matrix.columns % 8 == 0 && has_vectors(matrix))
    sum_columns<8><<<blocks_for(matrix.columns, kOwnColumns), 256, 0, queue>>>(matrix, out.data);
  else
    sum_columns<1><<<blocks_for(matrix.columns, 256 / kRowLanes), 256, 0, queue>>>(matrix, out.data);
  require_launch("column_sums");
}

}  // namespace weft::kernels::cuda
