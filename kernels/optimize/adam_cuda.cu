// SPDX-License-Identifier: Apache-2.0
//
// Updates from gradients in memory, initialisation, conversions and checks of parameters. Limit: memory, one pass each.
#include <cfloat>

#include "kernels/matrix_cuda.cuh"
#include "kernels/optimize/adam.hpp"
#include "kernels/optimize/adam_cuda.cuh"
#include "kernels/optimize/packed_weights.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

/// A block of 256 columns of a row: the work item of a warp.
struct Place {
  std::int64_t row, column, block;  // block: of the row
  int count;
};
__device__ __forceinline__ Place place_of(const ParameterRows& p, std::int64_t index) {
  const std::int64_t blocks = p.blocks_per_row(), row = index / blocks, block = index % blocks;
  const std::int64_t segment = block / p.blocks_per_segment();
  const std::int64_t inside = block % p.blocks_per_segment() * kBlockColumns;
  return {row, segment * p.segment + inside, block, static_cast<int>(min(kBlockColumns, p.segment - inside))};
}
__device__ __forceinline__ std::int64_t warp_index() {
  return static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
}
__device__ __forceinline__ std::int64_t warp_count() { return static_cast<std::int64_t>(gridDim.x) * kWarps; }
unsigned warps_for(std::int64_t count) { return blocks_for(count, kWarps, multiprocessors() * 32); }

template <StorageType storage>
__global__ void __launch_bounds__(kThreads) update_rows(ParameterRows p, StatePointers pointers, std::int64_t row_begin,
                                                        Matrix<const float> gradient, const AdamStep* step) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const AdamRate rate = adam_rate(*step);
  if (rate.withheld != 0) return;
  const std::int64_t total = gradient.rows * p.blocks_per_row();
  for (std::int64_t index = warp_index(); index < total; index += warp_count()) {
    const Place place = place_of(p, index);
    const std::int64_t row = row_begin + place.row, column = place.column + lane * kLaneColumns;
    const bool live = lane * kLaneColumns < place.count;
    const std::int64_t at = row * p.columns + column, scale = row * p.blocks_per_row() + place.block;
    LaneState<storage> state{};
    float g[8] = {};
    if (live) {
      const float4* from = reinterpret_cast<const float4*>(gradient.row(place.row) + column);
      const float4 a = __ldcs(from), b = __ldcs(from + 1);
      g[0] = a.x, g[1] = a.y, g[2] = a.z, g[3] = a.w, g[4] = b.x, g[5] = b.y, g[6] = b.z, g[7] = b.w;
      state.weight = load_weight(pointers, at);
      load_moments(state, pointers, at);
    }
    if constexpr (storage == StorageType::eight_bit) {
      state.first_scale = p.first_scale[scale];
      state.second_scale = p.second_scale[scale];
    }
    const bool moments = update8(AdamRule{}, state, g, rate, pointers.first_element + static_cast<std::uint64_t>(at));
    if (live) store_state(state, pointers, at, moments);
    if constexpr (storage == StorageType::eight_bit)
      if (lane == 0) {
        p.first_scale[scale] = state.first_scale;
        p.second_scale[scale] = state.second_scale;
      }
  }
}

__global__ void __launch_bounds__(kThreads)
    update_rows_any(ParameterRows p, std::int64_t row_begin, Matrix<const float> gradient, const AdamStep* step) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const AdamStep adam = *step;
  if (adam.withheld != 0) return;
  const std::int64_t total = gradient.rows * p.blocks_per_row();
  for (std::int64_t index = warp_index(); index < total; index += warp_count()) {
    const Place place = place_of(p, index);
    float g[kLaneColumns] = {};
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j)
      if (lane + kWarp * j < place.count) g[j] = gradient(place.row, place.column + lane + kWarp * j);
    update_strided(AdamRule{}, p, row_begin + place.row, place.column, place.count, g, adam, lane);
  }
}

__global__ void update_vector(ParameterVector p, const float* gradient, const AdamStep* step) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.weight.size || step->withheld != 0) return;
  float w = p.weight[i], m = p.first_moment[i], v = p.second_moment[i];
  adam_rule(*step, 0.0f, gradient[i], w, m, v);
  p.weight[i] = w;
  p.first_moment[i] = m;
  p.second_moment[i] = v;
}

__device__ __forceinline__ void store_weight(const ParameterRows& p, std::int64_t at, float weight) {
  if (p.storage == StorageType::fp32) {
    static_cast<std::uint16_t*>(p.weight)[at] = static_cast<std::uint16_t>((float_bits(weight) + 0x8000u) >> 16);
    p.weight_rest[at] = static_cast<std::int16_t>(float_bits(weight) & 0xffffu);
  } else {
    static_cast<bf16*>(p.weight)[at] = to_bf16(weight);
  }
}
__device__ __forceinline__ float exact_weight(const ParameterRows& p, std::int64_t at) {
  const std::uint32_t high = static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(p.weight)[at]) << 16;
  if (p.storage != StorageType::fp32) return bits_float(high);
  return bits_float(high + static_cast<std::uint32_t>(static_cast<std::int32_t>(p.weight_rest[at])));
}

__global__ void fill_uniform(ParameterRows p, float bound, std::uint64_t seed, Purpose purpose) {
  const std::int64_t total = p.rows * p.columns;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::uint64_t first = p.global_element(0, 0);
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    // Element e is word e % 4 of the generator's call e / 4.
    const std::uint64_t element = first + static_cast<std::uint64_t>(i);
    const Random4 random = philox(seed, purpose, 0, element / 4);
    const int part = static_cast<int>(element % 4);
    const std::uint32_t word = part == 0   ? random.word[0]
                               : part == 1 ? random.word[1]
                               : part == 2 ? random.word[2]
                                           : random.word[3];
    store_weight(p, i, __fmul_rn(bound, __fsub_rn(2.0f * uniform_float(word), 1.0f)));
  }
}

__global__ void join_planes(ParameterRows p, std::int64_t row_begin, Matrix<float> out) {
  const std::int64_t total = out.rows * p.columns;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step)
    out(i / p.columns, i % p.columns) = exact_weight(p, row_begin * p.columns + i);
}

__global__ void split_planes(ParameterRows p, std::int64_t row_begin, Matrix<const float> in) {
  const std::int64_t total = in.rows * p.columns;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step)
    store_weight(p, row_begin * p.columns + i, in(i / p.columns, i % p.columns));
}

template <int kWidth>
__global__ void find_beyond(AnyMatrix matrix, float largest, std::int32_t* flag) {
  const std::int64_t per_row = matrix.columns / kWidth, total = matrix.rows * per_row;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  bool inside = true;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    float value[kWidth];
    const std::int64_t row = matrix.rows == 1 ? 0 : i / per_row;
    load_columns(matrix, row, (i - row * per_row) * kWidth, value);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) inside = inside && fabsf(value[j]) <= largest;
  }
  if (!inside) atomicOr(flag, 1);
}

/// Joins the two planes: the high plane alone is infinite for a finite number that rounds up to infinity.
__global__ void find_nonfinite_planes(ParameterRows p, std::int32_t* flag) {
  const std::int64_t total = p.rows * p.columns;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  bool finite = true;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step)
    finite = finite && is_finite(exact_weight(p, i));
  if (!finite) atomicOr(flag, 1);
}

__global__ void find_nan_codes(const std::uint8_t* codes, std::int64_t count, std::int32_t* flag) {
  static_assert(kCodeNaN == 0x7f);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  std::uint32_t carry = 0;  // bit 7 of a byte: one of these codes had all lower bits set
  const std::int64_t words = count / 16;
  for (std::int64_t i = index; i < words; i += step) {
    const uint4 word = __ldcs(reinterpret_cast<const uint4*>(codes) + i);
    for (const std::uint32_t four : {word.x, word.y, word.z, word.w}) carry |= (four & 0x7f7f7f7fu) + 0x01010101u;
  }
  for (std::int64_t i = words * 16 + index; i < count; i += step) carry |= (codes[i] & 0x7fu) + 1u;
  if ((carry & 0x80808080u) != 0) atomicOr(flag, 1);
}

unsigned blocks_of(std::int64_t count) { return blocks_for(count, kThreads, multiprocessors() * 32); }

}  // namespace

void adam_rows(const Execution& execution, const ParameterRows& p, std::int64_t row_begin, Matrix<const float> gradient,
               const AdamStep* step) {
  require_cuda_storage(p);
  if (gradient.rows == 0) return;
  const cudaStream_t queue = stream_of(execution);
  const unsigned grid = warps_for(gradient.rows * p.blocks_per_row());
  const bool vector = has_vector_storage(p) && gradient.stride % 4 == 0 && is_aligned(gradient.data, 16);
  if (!vector)
    update_rows_any<<<grid, kThreads, 0, queue>>>(p, row_begin, gradient, step);
  else if (p.storage == StorageType::fp32)
    update_rows<StorageType::fp32><<<grid, kThreads, 0, queue>>>(p, pointers_of(p), row_begin, gradient, step);
  else if (p.storage == StorageType::bf16)
    update_rows<StorageType::bf16><<<grid, kThreads, 0, queue>>>(p, pointers_of(p), row_begin, gradient, step);
  else
    update_rows<StorageType::eight_bit><<<grid, kThreads, 0, queue>>>(p, pointers_of(p), row_begin, gradient, step);
  require_launch("adam_rows");
}

void adam_vector(const Execution& execution, const ParameterVector& p, Array<const float> gradient,
                 const AdamStep* step) {
  if (p.weight.size == 0) return;
  update_vector<<<blocks_for(p.weight.size, kThreads), kThreads, 0, stream_of(execution)>>>(p, gradient.data, step);
  require_launch("adam_vector");
}

void initialise_uniform(const Execution& execution, const ParameterRows& p, float bound, std::uint64_t seed,
                        Purpose purpose) {
  require_cuda_storage(p);
  const std::int64_t count = p.rows * p.columns;
  if (count == 0) return;
  fill_uniform<<<blocks_of(count), kThreads, 0, stream_of(execution)>>>(p, bound, seed, purpose);
  require_launch("initialise_uniform");
}

void weights_to_float(const Execution& execution, const ParameterRows& p, std::int64_t row_begin, Matrix<float> out) {
  if (p.packing != Packing::none)
    return cuda::unpack_weights(execution, p, row_begin, {out.data, Scalar::fp32, out.rows, out.columns, out.stride});
  require_cuda_storage(p);
  if (out.rows == 0) return;
  join_planes<<<blocks_of(out.rows * p.columns), kThreads, 0, stream_of(execution)>>>(p, row_begin, out);
  require_launch("weights_to_float");
}

void weights_from_float(const Execution& execution, const ParameterRows& p, std::int64_t row_begin,
                        Matrix<const float> in) {
  if (p.packing != Packing::none) return pack_weights(execution, p, row_begin, in);
  require_cuda_storage(p);
  if (in.rows == 0) return;
  split_planes<<<blocks_of(in.rows * p.columns), kThreads, 0, stream_of(execution)>>>(p, row_begin, in);
  require_launch("weights_from_float");
}

void flag_beyond(const Execution& execution, AnyMatrix matrix, float largest, std::int32_t* flag) {
  if (matrix.rows == 0 || matrix.columns == 0) return;
  const cudaStream_t queue = stream_of(execution);
  if (matrix.stride == matrix.columns) {
    matrix.columns *= matrix.rows;
    matrix.stride = matrix.columns;
    matrix.rows = 1;
  }
  if (matrix.columns % 8 == 0 && has_vectors(matrix))
    find_beyond<8><<<blocks_of(matrix.rows * matrix.columns / 8), kThreads, 0, queue>>>(matrix, largest, flag);
  else
    find_beyond<1><<<blocks_of(matrix.rows * matrix.columns), kThreads, 0, queue>>>(matrix, largest, flag);
  require_launch("flag_beyond");
}

void flag_nonfinite(const Execution& execution, const ParameterRows& p, std::int32_t* flag) {
  require_cuda_storage(p);
  const std::int64_t count = p.rows * p.columns;
  if (count == 0) return;
  const cudaStream_t queue = stream_of(execution);
  const auto matrix = [&](void* data, Scalar type, std::int64_t columns) {
    return AnyMatrix{data, type, p.rows, columns, columns};
  };
  if (p.storage == StorageType::fp32)
    find_nonfinite_planes<<<blocks_of(count), kThreads, 0, queue>>>(p, flag);
  else
    cuda::flag_beyond(execution, matrix(p.weight, Scalar::bf16, p.columns), FLT_MAX, flag);
  if (p.storage != StorageType::eight_bit) {
    const Scalar type = p.storage == StorageType::fp32 ? Scalar::fp32 : Scalar::bf16;
    cuda::flag_beyond(execution, matrix(p.first_moment, type, p.columns), FLT_MAX, flag);
    cuda::flag_beyond(execution, matrix(p.second_moment, type, p.columns), FLT_MAX, flag);
  } else {
    // A moment that is not finite has an infinite block scale or a NaN code.
    cuda::flag_beyond(execution, matrix(p.first_scale, Scalar::fp32, p.blocks_per_row()), FLT_MAX, flag);
    cuda::flag_beyond(execution, matrix(p.second_scale, Scalar::fp32, p.blocks_per_row()), FLT_MAX, flag);
    find_nan_codes<<<blocks_of(count), kThreads, 0, queue>>>(static_cast<const std::uint8_t*>(p.first_moment), count,
                                                             flag);
    find_nan_codes<<<blocks_of(count), kThreads, 0, queue>>>(static_cast<const std::uint8_t*>(p.second_moment), count,
                                                             flag);
  }
  require_launch("flag_nonfinite");
}

}  // namespace weft::kernels::cuda
