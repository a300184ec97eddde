// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory, reading W once. A block has 24 KB (96 KB: of a wide tile) of its weights in flight before the kernel
// before it has ended. Blocks of a cluster share a tile of outputs, each with a range of inputs, and read one another's
// sums in the order of their ranks. Tiles of 128 outputs where there are many: x is read once per tile.
#include "kernels/language/activation/rule.hpp"
#include "kernels/language/attention/flash_context_cuda.cuh"
#include "kernels/language/linear/few_rows.hpp"
#include "kernels/language/linear/few_rows_cuda.hpp"
#include "kernels/language/linear/many_outputs_cuda.hpp"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr std::int64_t kMostRows = 64, kNarrowTile = 32, kWideTile = 128;
constexpr std::int64_t kManyOutputs = 16384;  ///< from here on wide tiles

enum class After : int { nothing, gelu, relu2 };

struct Arguments {
  FewRowsOperands operands;
  const float* bias;  ///< or null
  bf16 *y, *activated;
  std::int64_t y_stride, activated_stride;
  After after;
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) multiply(const __grid_constant__ Arguments a) {
#ifdef WEFT_BEFORE_AMPERE
  __trap();  // no products of bf16; Runtime refuses these GPUs
#else
  allow_next_kernel();
  const int part = static_cast<int>(blockIdx.x), parts = static_cast<int>(gridDim.x),
            first_output = static_cast<int>(blockIdx.y) * Tile::kOutputs;
  const FewRowsOperands& o = a.operands;
  const int chunks = (o.inputs + Tile::kChunk - 1) / Tile::kChunk;
  DeviceContext<bf16> context;
  few_rows_sum<Tile>(context, o, first_output, chunks * part / parts, chunks * (part + 1) / parts,
                     [] { await_previous_kernel(); });
  if (parts > 1) sync_cluster();
  float* const sums = reinterpret_cast<float*>(context.shared);
  // The blocks of the cluster take the outputs of the tile in turn.
  for (int i = part * Tile::kThreads + context.thread; i < o.rows * Tile::kOutputs; i += parts * Tile::kThreads) {
    const int row = i / Tile::kOutputs, column = i % Tile::kOutputs, output = first_output + column;
    if (output >= o.outputs) continue;
    float* const at = sums + row * Tile::kSumsStride + column;
    float sum = 0.0f;
    if (parts == 1) {
      sum = *at;
    } else {
#pragma unroll
      for (int rank = 0; rank < kFewRowsMostParts; ++rank)
        if (rank < parts) sum += *in_cluster(at, rank);
    }
    if (a.bias != nullptr) sum += a.bias[output];
    const bf16 stored = to_bf16(sum);
    a.y[row * a.y_stride + output] = stored;
    if (a.after == After::nothing) continue;
    const float value =
        a.after == After::gelu ? activated<MlpActivation::gelu>(stored) : activated<MlpActivation::relu2>(stored);
    a.activated[row * a.activated_stride + output] = to_bf16(value);
  }
  if (parts > 1) meet_cluster();  // the sums of this block may still be read
#endif
}

template <class Tile>
void launch(const Execution& execution, const Arguments& arguments) {
  static_assert(Tile::kSharedBytes <= kSharedMemory);
  static const bool once = [] {
    require(cudaFuncSetAttribute(multiply<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes),
            "linear: shared memory");
    return true;
  }();
  static_cast<void>(once);
  const FewRowsOperands& o = arguments.operands;
  const int tiles = (o.outputs + Tile::kOutputs - 1) / Tile::kOutputs,
            parts = few_rows_parts(tiles, (o.inputs + Tile::kChunk - 1) / Tile::kChunk);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(tiles));
  launch_early<Arguments>(execution, "linear", multiply<Tile>, grid, Tile::kThreads, Tile::kSharedBytes, parts,
                          arguments);
}

template <int kRows>
void launch(const Execution& execution, const Arguments& arguments, bool transposed) {
  if (transposed) return launch<FewRowsTile<kRows, kNarrowTile, true>>(execution, arguments);
  if (arguments.operands.outputs >= kManyOutputs)
    return launch<FewRowsTile<kRows, kWideTile, false>>(execution, arguments);
  launch<FewRowsTile<kRows, kNarrowTile, false>>(execution, arguments);
}

/// bf16 in rows of whole 16-byte words.
bool is_in_words(const AnyMatrix& matrix) {
  return matrix.type == Scalar::bf16 && matrix.stride % 8 == 0 && is_aligned(matrix.data, 16);
}

}  // namespace

bool multiply_few_rows(const Execution& execution, const LinearWeights& weights, AnyMatrix x, AnyMatrix y,
                       const std::optional<ActivationAfter>& after) {
  constexpr std::int64_t kMostOutputs = 65535 * kNarrowTile, kMostInputs = std::int64_t{1} << 30;
  if (!has_clusters() || x.rows < 1 || x.rows > kMostRows || !is_in_words(x) || !is_in_words(weights.matrix) ||
      y.type != Scalar::bf16 || x.columns < 8 || x.columns % 8 != 0 || x.columns > kMostInputs || y.columns < 1 ||
      y.columns > kMostOutputs || (weights.transposed && y.columns % 8 != 0))
    return false;
  Arguments arguments{.operands = {.x = static_cast<const bf16*>(x.data),
                                   .weight = static_cast<const bf16*>(weights.matrix.data),
                                   .x_stride = x.stride,
                                   .weight_stride = weights.matrix.stride,
                                   .rows = static_cast<int>(x.rows),
                                   .outputs = static_cast<int>(y.columns),
                                   .inputs = static_cast<int>(x.columns)},
                      .bias = weights.bias.size > 0 ? weights.bias.data : nullptr,
                      .y = static_cast<bf16*>(y.data),
                      .activated = nullptr,
                      .y_stride = y.stride,
                      .activated_stride = 0,
                      .after = After::nothing};
  if (after) {
    if (is_gated(after->kind) || after->activated.type != Scalar::bf16) return false;
    arguments.after = after->kind == MlpActivation::gelu ? After::gelu : After::relu2;
    arguments.activated = static_cast<bf16*>(after->activated.data);
    arguments.activated_stride = after->activated.stride;
  }
  if (!weights.transposed && !after && y.columns >= kManyOutputs) {
    const FewRowsOperands& o = arguments.operands;
    if (multiply_many_outputs(execution, {o.x, o.weight, arguments.bias, arguments.y, o.x_stride, o.weight_stride,
                                          arguments.y_stride, o.rows, o.outputs, o.inputs}))
      return true;
  }
  if (x.rows <= 8)
    launch<8>(execution, arguments, weights.transposed);
  else
    launch<kMostRows>(execution, arguments, weights.transposed);
  return true;
}

}  // namespace weft::kernels::cuda
