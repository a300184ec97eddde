// SPDX-License-Identifier: Apache-2.0
//
// Limit: with one row the decoding of the codes, with eight the products, in fp32: an unpacked matrix is read in 2
// bytes per weight, its codes in half a byte. Eight rows share one pass over the codes; further ones read them again,
// from the second-level cache.
//
// Invariant. The order in which a sum is formed depends on the number of outputs and inputs alone: a row has the same
// bits whatever the other rows are and however many.
#include "kernels/language/linear/packed_rows_cuda.hpp"
#include "kernels/launch_cuda.cuh"
#include "kernels/optimize/packed_weights_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kMostRows = 8;  // of a pass over the codes
constexpr int kOutputs = 4;   // of a block, W stored as [outputs, inputs]
constexpr int kTile = 64;     // outputs of a block, W stored as [inputs, outputs]: one scale per row
constexpr int kInputsOfWarp = kWarp * kWordColumns / kTile;  // rows of such a tile that a warp reads together
constexpr int kInputsAtOnce = 4;                             // of those, that a lane reads before it uses one
constexpr int kMostParts = 8;                                // blocks of a cluster, which divide the inputs of a tile

struct PackedRows {
  ParameterRows weight;
  const bf16* x;
  const float* bias;  // or null
  bf16* y;
  std::int64_t x_stride, y_stride;
  int rows, outputs, inputs;
};

__device__ __forceinline__ void store_output(const PackedRows& a, int row, int output, float sum) {
  if (row >= a.rows || output >= a.outputs) return;
  a.y[row * a.y_stride + output] = to_bf16(a.bias == nullptr ? sum : sum + a.bias[output]);
}

/// Sums of kCount values over the lanes, in the same order for every value. Returns the sum of value
/// lane / (32 / kCount).
template <int kCount>
__device__ __forceinline__ float sum_over_lanes(float (&value)[kCount], int lane) {
  static_assert(kWarp % kCount == 0);
#pragma unroll
  for (int mask = kWarp / 2, held = kCount; mask > 0; mask /= 2) {
    if (held == 1) {
      value[0] += __shfl_xor_sync(kAllLanes, value[0], mask);
      continue;
    }
    held /= 2;
    const bool upper = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < held; ++i) {
      const float received = __shfl_xor_sync(kAllLanes, upper ? value[i] : value[i + held], mask);
      value[i] = (upper ? value[i + held] : value[i]) + received;
    }
  }
  return value[0];
}

/// W [outputs, inputs]: a warp takes every kWarps-th group of 256 inputs of kOutputs outputs.
template <Packing kPacking, int kRows>
__global__ void __launch_bounds__(kThreads) multiply(const __grid_constant__ PackedRows a) {
  constexpr int kSums = kOutputs * kRows;
  __shared__ float normal[16];
  __shared__ float of_warps[kWarps][kSums];
  load_normal_values(normal);
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int first_output = static_cast<int>(blockIdx.x) * kOutputs, first_row = static_cast<int>(blockIdx.y) * kRows;
  const auto* const words = static_cast<const PackedWord<kPacking>*>(a.weight.weight);
  const std::int64_t per_output = a.inputs / kWordColumns;
  float sum[kSums] = {};
  for (int input = (warp * kWarp + lane) * kWordColumns; input < a.inputs; input += kThreads * kWordColumns) {
    PackedWord<kPacking> word[kOutputs];
    float unit[kOutputs];
    uint4 x[kRows];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      const std::int64_t output = min(first_output + o, a.outputs - 1);
      word[o] = __ldg(words + output * per_output + input / kWordColumns);
      unit[o] = packed_unit_at<kPacking>(a.weight, output, input);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      x[r] = *reinterpret_cast<const uint4*>(a.x + min(first_row + r, a.rows - 1) * a.x_stride + input);
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      float weight[kWordColumns];
      unpack_word<kPacking>(word[o], unit[o], normal, weight);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float of_row[kWordColumns];
        unpack8(x[r], of_row);
#pragma unroll
        for (int i = 0; i < kWordColumns; ++i) sum[o * kRows + r] = __fmaf_rn(of_row[i], weight[i], sum[o * kRows + r]);
      }
    }
  }
  const float total = sum_over_lanes(sum, lane);
  constexpr int kLanesOfSum = kWarp / kSums;
  if (lane % kLanesOfSum == 0) of_warps[warp][lane / kLanesOfSum] = total;
  __syncthreads();
  const int at = static_cast<int>(threadIdx.x);
  if (at >= kSums) return;
  float of_block = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) of_block += of_warps[w][at];
  store_output(a, first_row + at % kRows, first_output + at / kRows, of_block);
}

/// W [inputs, outputs]: the blocks of a cluster divide the inputs of a tile of outputs, their warps groups of
/// kInputsOfWarp inputs.
template <Packing kPacking, int kRows>
__global__ void __launch_bounds__(kThreads) multiply_transposed(const __grid_constant__ PackedRows a) {
  constexpr int kSums = kTile * kRows, kWords = kTile / kWordColumns;
  __shared__ float normal[16];
  __shared__ float of_warps[kWarps][kSums];
  __shared__ float of_block[kSums];
  load_normal_values(normal);
  __syncthreads();
  await_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp,
            word_of_tile = lane % kWords;
  const int part = static_cast<int>(blockIdx.x), parts = static_cast<int>(gridDim.x),
            first_output = static_cast<int>(blockIdx.y) * kTile, first_row = static_cast<int>(blockIdx.z) * kRows;
  const int end = static_cast<int>(std::int64_t{a.inputs} * (part + 1) / parts);
  const auto* const words = static_cast<const PackedWord<kPacking>*>(a.weight.weight);
  const std::int64_t per_input = a.outputs / kWordColumns;
  float sum[kRows][kWordColumns] = {};
  constexpr int kStep = kWarps * kInputsOfWarp;
  for (int first = static_cast<int>(std::int64_t{a.inputs} * part / parts) + warp * kInputsOfWarp + lane / kWords;
       first < end; first += kStep * kInputsAtOnce) {
    PackedWord<kPacking> word[kInputsAtOnce];
    float unit[kInputsAtOnce], x[kInputsAtOnce][kRows];
#pragma unroll
    for (int i = 0; i < kInputsAtOnce; ++i) {
      const int input = first + i * kStep, valid = min(input, end - 1);
      word[i] = __ldg(words + valid * per_input + first_output / kWordColumns + word_of_tile);
      unit[i] = packed_unit_at<kPacking>(a.weight, valid, first_output);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        x[i][r] = input < end ? float{a.x[min(first_row + r, a.rows - 1) * a.x_stride + input]} : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kInputsAtOnce; ++i) {
      if (first + i * kStep >= end) break;  // a weight may be infinite
      float weight[kWordColumns];
      unpack_word<kPacking>(word[i], unit[i], normal, weight);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int c = 0; c < kWordColumns; ++c) sum[r][c] = __fmaf_rn(x[i][r], weight[c], sum[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kWordColumns; ++c) {
#pragma unroll
      for (int mask = kWarp / 2; mask >= kWords; mask /= 2) sum[r][c] += __shfl_xor_sync(kAllLanes, sum[r][c], mask);
      if (lane < kWords) of_warps[warp][r * kTile + lane * kWordColumns + c] = sum[r][c];
    }
  __syncthreads();
  for (int at = static_cast<int>(threadIdx.x); at < kSums; at += kThreads) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += of_warps[w][at];
    of_block[at] = total;
  }
  sync_cluster();
  for (int at = part * kThreads + static_cast<int>(threadIdx.x); at < kSums; at += parts * kThreads) {
    float total = 0;
    for (int rank = 0; rank < parts; ++rank) total += in_cluster(of_block, rank)[at];
    store_output(a, first_row + at / kTile, first_output + at % kTile, total);
  }
  sync_cluster();  // the others have read its sums
}

/// Enough blocks for a GPU of about 132 multiprocessors. Depends on outputs and inputs alone.
int parts_of(int tiles, int inputs) {
  int parts = 1;
  while (parts < kMostParts && tiles * parts < 256 && inputs / parts >= 4 * kWarps * kInputsOfWarp) parts *= 2;
  return parts;
}

template <Packing kPacking, int kRows>
void launch(const Execution& execution, const PackedRows& a, bool transposed) {
  const auto groups = static_cast<unsigned>((a.rows + kRows - 1) / kRows);
  if (!transposed) {
    const dim3 grid(static_cast<unsigned>((a.outputs + kOutputs - 1) / kOutputs), groups);
    multiply<kPacking, kRows><<<grid, kThreads, 0, stream_of(execution)>>>(a);
    return require_launch("linear");
  }
  const int tiles = a.outputs / kTile, parts = parts_of(tiles, a.inputs);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(tiles), groups);
  launch_early<PackedRows>(execution, "linear", multiply_transposed<kPacking, kRows>, grid, kThreads, 0, parts, a,
                           {.most_shared = false});
}

template <Packing kPacking>
void launch(const Execution& execution, const PackedRows& a, bool transposed) {
  if (a.rows == 1)
    launch<kPacking, 1>(execution, a, transposed);
  else if (a.rows == 2)
    launch<kPacking, 2>(execution, a, transposed);
  else if (a.rows <= 4)
    launch<kPacking, 4>(execution, a, transposed);
  else
    launch<kPacking, kMostRows>(execution, a, transposed);
}

}  // namespace

bool fits_packed_rows(const LinearWeights& weights, const AnyMatrix& x, const AnyMatrix& y) {
  constexpr std::int64_t kMost = std::int64_t{1} << 20;  // outputs and inputs
  return has_clusters() && weights.packed != nullptr && has_packed_words(*weights.packed) && x.type == Scalar::bf16 &&
         y.type == Scalar::bf16 && x.rows >= 1 && x.rows <= kMostFewRows && x.columns <= kMost && y.columns <= kMost &&
         (weights.transposed ? y.columns % kTile == 0 : x.stride % kWordColumns == 0 && is_aligned(x.data, 16));
}

bool multiply_packed_rows(const Execution& execution, const LinearWeights& weights, const AnyMatrix& x,
                          const AnyMatrix& y) {
  if (!fits_packed_rows(weights, x, y)) return false;
  const PackedRows arguments{.weight = *weights.packed,
                             .x = static_cast<const bf16*>(x.data),
                             .bias = weights.bias.size > 0 ? weights.bias.data : nullptr,
                             .y = static_cast<bf16*>(y.data),
                             .x_stride = x.stride,
                             .y_stride = y.stride,
                             .rows = static_cast<int>(x.rows),
                             .outputs = static_cast<int>(y.columns),
                             .inputs = static_cast<int>(x.columns)};
  if (weights.packed->packing == Packing::nf4)
    launch<Packing::nf4>(execution, arguments, weights.transposed);
  else
    launch<Packing::int8>(execution, arguments, weights.transposed);
  return true;
}

}  // namespace weft::kernels::cuda
