// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory, reading W once; with few rows the latencies between the end of the kernel before and the last store. A
// block has up to 24 KB (64 KB: of a wide tile) of its weights in shared memory before that kernel has ended. Blocks of
// a cluster share a tile of outputs, each with a range of inputs. Each sends its sums to the block that finishes them,
// which adds them in the order of ranks. Tiles of 128 outputs where there are many: x is read once per tile.
#include "kernels/language/activation/rule.hpp"
#include "kernels/language/attention/flash_context_cuda.cuh"
#include "kernels/language/linear/few_rows.hpp"
#include "kernels/language/linear/few_rows_cuda.hpp"
#include "kernels/language/linear/many_outputs_cuda.hpp"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr std::int64_t kNarrowTile = 32, kMiddleTile = 64, kWideTile = 128;
constexpr std::int64_t kSeveralOutputs = 1024;  ///< from here on middle tiles, in products that normalise
constexpr std::int64_t kManyOutputs = 16384;    ///< from here on wide tiles

enum class After : int { nothing, gelu, relu2 };

struct Arguments {
  FewRowsOperands operands;
  const float* bias;     ///< or null
  const bf16* residual;  ///< or null
  bf16 *y, *activated;   ///< y: or null, not stored
  Moments* moments;      ///< of y; or null
  std::int64_t residual_stride, y_stride, activated_stride;
  After after;
};

/// Of few_rows_sum: rows and first outputs of a unit.
template <class Tile>
__device__ __forceinline__ int row_of(int unit) {
  return unit / (Tile::kOutputs / 4);
}
template <class Tile>
__device__ __forceinline__ int column_of(int unit) {
  return unit % (Tile::kOutputs / 4) * 4;
}

template <class Tile>
__device__ __forceinline__ FewRowsColumns load_bias(const Arguments& a, int first_output, int unit) {
  const int output = first_output + column_of<Tile>(unit);
  FewRowsColumns bias{};
  if (a.bias == nullptr) return bias;
  if (output + 4 <= a.operands.outputs) return *reinterpret_cast<const FewRowsColumns*>(a.bias + output);
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (output + i < a.operands.outputs) bias.value[i] = a.bias[output + i];
  return bias;
}

template <class Tile>
__device__ __forceinline__ uint2 load_residual(const Arguments& a, int first_output, int unit) {
  const int row = row_of<Tile>(unit), output = first_output + column_of<Tile>(unit);
  if (a.residual == nullptr || row >= a.operands.rows || output >= a.operands.outputs) return {};
  return *reinterpret_cast<const uint2*>(a.residual + row * a.residual_stride + output);
}

[[maybe_unused]] __device__ __forceinline__ void store_columns4(bf16* to, const bf16 (&value)[4], int count) {
  if (count >= 4) {
    *reinterpret_cast<uint2*>(to) = {value[0].bits | unsigned{value[1].bits} << 16,
                                     value[2].bits | unsigned{value[3].bits} << 16};
    return;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (i < count) to[i] = value[i];
}

/// Four sums of a row. All lanes of a warp call this together, eight of them for a group of kMomentColumns.
template <class Tile>
__device__ __forceinline__ void finish_sums(const Arguments& a, int first_output, int unit, const FewRowsColumns& sums,
                                            const FewRowsColumns& bias, uint2 residual) {
  const int row = row_of<Tile>(unit), output = first_output + column_of<Tile>(unit);
  const int count = row < a.operands.rows ? a.operands.outputs - output : 0;  // at most four are used
  bf16 stored[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    stored[i] = to_bf16(sums.value[i] + bias.value[i]);
    if (a.residual != nullptr) {
      const unsigned pair = i < 2 ? residual.x : residual.y;
      stored[i] = to_bf16(float{stored[i]} + (i % 2 == 0 ? flash_low<bf16>(pair) : flash_high<bf16>(pair)));
    }
  }
  if (a.y != nullptr && count > 0) store_columns4(a.y + row * a.y_stride + output, stored, count);
  if (a.after != After::nothing && count > 0) {
    bf16 value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      value[i] = to_bf16(a.after == After::gelu ? activated<MlpActivation::gelu>(stored[i])
                                                : activated<MlpActivation::relu2>(stored[i]));
    store_columns4(a.activated + row * a.activated_stride + output, value, count);
  }
  if (a.moments == nullptr) return;
  constexpr int kLanes = kMomentColumns / 4;
  const auto of_group = [](float value) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(kAllLanes, value, mask);
    return value;
  };
  const int group = output / kMomentColumns,
            columns = max(1, min(kMomentColumns, a.operands.outputs - group * kMomentColumns));
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += i < count ? float{stored[i]} : 0.0f;
  const float mean = __fdividef(of_group(sum), static_cast<float>(columns));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float distance = i < count ? float{stored[i]} - mean : 0.0f;
    squares += distance * distance;
  }
  squares = of_group(squares);
  if (unit % kLanes == 0 && count > 0)
    a.moments[row * ((a.operands.outputs + kMomentColumns - 1) / kMomentColumns) + group] = {mean, squares};
}

/// Units that a block gets from the blocks of its cluster: 32 in turn for each block.
template <class Tile>
constexpr int exchanged_units(int parts) {
  return (Tile::kUnits / 32 + parts - 1) / parts * 32;
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kRows == 8 ? 1 : 2)
    multiply(const __grid_constant__ Arguments a) {
#ifdef WEFT_BEFORE_AMPERE
  __trap();  // no products of bf16; Runtime refuses these GPUs
#else
  allow_next_kernel();
  const int part = static_cast<int>(blockIdx.x), parts = static_cast<int>(gridDim.x),
            first_output = static_cast<int>(blockIdx.y) * Tile::kOutputs;
  const FewRowsOperands& o = a.operands;
  const int chunks = (o.inputs + Tile::kChunk - 1) / Tile::kChunk, most_chunks = (chunks + parts - 1) / parts;
  DeviceContext<bf16> context;
  const int thread = context.thread, lane = thread % kWarp;
  // [rank][unit], at the same place in all blocks of the cluster.
  FewRowsColumns* const exchanged = reinterpret_cast<FewRowsColumns*>(context.shared + Tile::shared_bytes(most_chunks));
  const int of_rank = exchanged_units<Tile>(parts);
  // The first unit of this thread: the 32-unit groups of a block are those of its rank, parts, … further.
  const int own = parts == 1 ? thread : (thread / kWarp * parts + part) * kWarp + lane;
  FewRowsColumns bias = load_bias<Tile>(a, first_output, own);
  uint2 residual{};
  few_rows_sum<Tile>(
      context, o, first_output, chunks * part / parts, chunks * (part + 1) / parts, most_chunks,
      [&] {
        if (parts > 1) meet_cluster();  // shared memory of the others exists
        await_previous_kernel();
        residual = load_residual<Tile>(a, first_output, own);
      },
      [&](int unit, const FewRowsColumns& sums, FewRowsColumns* at) {
        const int group = unit / kWarp;
        if (parts > 1) at = in_cluster(exchanged + part * of_rank + group / parts * kWarp + lane, group % parts);
        *at = sums;
      });
  if (parts > 1) sync_cluster();
#pragma unroll 1
  for (int at = thread; at < of_rank; at += Tile::kThreads) {
    const int unit = (at / kWarp * parts + part) * kWarp + lane;
    if (row_of<Tile>(unit - lane) >= o.rows) break;  // of the whole warp
    if (at != thread) {
      bias = load_bias<Tile>(a, first_output, unit);
      residual = load_residual<Tile>(a, first_output, unit);
    }
    FewRowsColumns sums{};
    if (parts == 1) {
      sums = *few_rows_unit<Tile>(context.shared, most_chunks, unit);  // this thread has written it
    } else {
      FewRowsColumns of_ranks[kFewRowsMostParts];
#pragma unroll
      for (int rank = 0; rank < kFewRowsMostParts; ++rank)
        of_ranks[rank] = exchanged[min(rank, parts - 1) * of_rank + at];
#pragma unroll
      for (int rank = 0; rank < kFewRowsMostParts; ++rank)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.value[i] += rank < parts ? of_ranks[rank].value[i] : 0.0f;
    }
    finish_sums<Tile>(a, first_output, unit, sums, bias, residual);
  }
#endif
}

template <class Tile>
void launch(const Execution& execution, const Arguments& arguments) {
  const FewRowsOperands& o = arguments.operands;
  const int tiles = (o.outputs + Tile::kOutputs - 1) / Tile::kOutputs,
            chunks = (o.inputs + Tile::kChunk - 1) / Tile::kChunk, parts = few_rows_parts(tiles, chunks);
  const int shared = Tile::shared_bytes((chunks + parts - 1) / parts) +
                     (parts == 1 ? 0 : parts * exchanged_units<Tile>(parts) * static_cast<int>(sizeof(FewRowsColumns)));
  static const bool once = [] {
    require(cudaFuncSetAttribute(multiply<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemory),
            "linear: shared memory");
    return true;
  }();
  static_cast<void>(once);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(tiles));
  launch_early<Arguments>(execution, "linear", multiply<Tile>, grid, Tile::kThreads, shared, parts, arguments);
}

template <int kRows>
void launch(const Execution& execution, const Arguments& arguments, bool transposed, bool normalised) {
  if (transposed && normalised) return launch<FewRowsTile<kRows, kNarrowTile, true, true>>(execution, arguments);
  if (transposed) return launch<FewRowsTile<kRows, kNarrowTile, true>>(execution, arguments);
  if (normalised && arguments.operands.outputs >= kSeveralOutputs)
    return launch<FewRowsTile<kRows, kMiddleTile, false, true>>(execution, arguments);
  if (normalised) return launch<FewRowsTile<kRows, kNarrowTile, false, true>>(execution, arguments);
  if (arguments.operands.outputs >= kManyOutputs)
    return launch<FewRowsTile<kRows, kWideTile, false>>(execution, arguments);
  launch<FewRowsTile<kRows, kNarrowTile, false>>(execution, arguments);
}

/// bf16 in rows that begin at multiples of four elements.
bool begins_in_fours(const AnyMatrix& matrix) {
  return matrix.type == Scalar::bf16 && matrix.stride % 4 == 0 && is_aligned(matrix.data, 8);
}

/// bf16 in rows of whole 16-byte words.
bool is_in_words(const AnyMatrix& matrix) {
  return matrix.type == Scalar::bf16 && matrix.stride % 8 == 0 && is_aligned(matrix.data, 16);
}

}  // namespace

bool fits_few_rows(const LinearWeights& weights, AnyMatrix x, AnyMatrix y) {
  constexpr std::int64_t kMostOutputs = 65535 * kNarrowTile, kMostInputs = std::int64_t{1} << 30;
  return has_clusters() && x.rows >= 1 && x.rows <= kMostFewRows && is_in_words(x) && is_in_words(weights.matrix) &&
         begins_in_fours(y) && is_aligned(weights.bias.data, 16) && x.columns >= 8 && x.columns % 8 == 0 &&
         x.columns <= kMostInputs && y.columns >= 1 && y.columns <= kMostOutputs &&
         (!weights.transposed || y.columns % 8 == 0);
}

bool multiply_few_rows(const Execution& execution, const LinearWeights& weights, AnyMatrix x, AnyMatrix y,
                       const FewRowsSteps& steps) {
  Arguments arguments{.operands = {.x = static_cast<const bf16*>(x.data),
                                   .weight = static_cast<const bf16*>(weights.matrix.data),
                                   .x_stride = x.stride,
                                   .weight_stride = weights.matrix.stride,
                                   .rows = static_cast<int>(x.rows),
                                   .outputs = static_cast<int>(y.columns),
                                   .inputs = static_cast<int>(x.columns)},
                      .bias = weights.bias.size > 0 ? weights.bias.data : nullptr,
                      .residual = static_cast<const bf16*>(steps.residual.data),
                      .y = static_cast<bf16*>(y.data),
                      .activated = static_cast<bf16*>(steps.activated.data),
                      .moments = steps.moments.data,
                      .residual_stride = steps.residual.stride,
                      .y_stride = y.stride,
                      .activated_stride = steps.activated.stride,
                      .after = After::nothing};
  if (steps.activation) arguments.after = *steps.activation == MlpActivation::gelu ? After::gelu : After::relu2;
  if (steps.norm != nullptr &&
      !(is_aligned(steps.norm->weights.weight.data, 16) && is_aligned(steps.norm->weights.bias.data, 16)))
    throw Error(ExitCode::internal, "linear: weight or bias of a norm is not aligned to 16 bytes");
  if (steps.norm != nullptr)
    arguments.operands.norm = {.weight = steps.norm->weights.weight.data,
                               .bias = steps.norm->weights.bias.data,
                               .moments = steps.norm->moments.data,
                               .epsilon = steps.norm->weights.epsilon,
                               .centred = steps.norm->weights.kind == Norm::layer};
  const Matrix<BlockSum> sums = steps.rule.softcap > 0 ? Matrix<BlockSum>{} : steps.sums;
  if (!weights.transposed && steps.norm == nullptr && !steps.activation && steps.residual.data == nullptr &&
      y.columns >= kManyOutputs &&
      multiply_many_outputs(execution, {arguments.operands, arguments.bias, arguments.y, arguments.y_stride,
                                        BlockRule(steps.rule), sums}))
    return sums.data != nullptr;
  if (x.rows <= 8)
    launch<8>(execution, arguments, weights.transposed, steps.norm != nullptr);
  else if (x.rows <= 32)
    launch<32>(execution, arguments, weights.transposed, steps.norm != nullptr);
  else
    launch<kMostFewRows>(execution, arguments, weights.transposed, steps.norm != nullptr);
  return false;
}

}  // namespace weft::kernels::cuda
