// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory, reading W once; with few rows the latencies between the end of the kernel before and the last store. A
// block has up to 24 KB (64 KB: of a wide tile) of its weights in shared memory before that kernel has ended. Blocks of
// a cluster share a tile of outputs, each with a range of inputs. Each sends its sums to the block that finishes them,
// which adds them in the order of ranks. Tiles of 128 outputs where there are many: x is read once per tile.
#include "kernels/language/linear/few_rows_cuda.hpp"
#include "kernels/language/linear/few_rows_finish_cuda.cuh"
#include "kernels/language/linear/hopper_rows_cuda.hpp"
#include "kernels/language/linear/many_outputs_cuda.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr std::int64_t kMiddleTile = 64, kWideTile = 128;
constexpr std::int64_t kSeveralOutputs = 1024;  ///< middle tiles from this number on
constexpr std::int64_t kManyOutputs = 16384;    ///< wide tiles from this number on

/// Successive outputs of a row that a thread finishes. One of a narrow tile, so that all warps have some; four of
/// others, which have enough for all.
template <class Tile>
constexpr int finished_at_once() {
  return Tile::kOutputs == kNarrowTile ? 1 : 4;
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kRows == 8 ? 1 : 2)
    multiply(const __grid_constant__ FewRowsArguments a) {
#ifdef WEFT_BEFORE_AMPERE
  __trap();  // no products of bf16; Runtime rejects these GPUs
#else
  allow_next_kernel();
  const int part = static_cast<int>(blockIdx.x), parts = static_cast<int>(gridDim.x),
            first_output = static_cast<int>(blockIdx.y) * Tile::kOutputs;
  const FewRowsOperands& o = a.operands;
  const int chunks = (o.inputs + Tile::kChunk - 1) / Tile::kChunk, most_chunks = (chunks + parts - 1) / parts;
  DeviceContext<bf16> context;
  const int thread = context.thread, lane = thread % kWarp;
  __shared__ std::uint64_t barrier;
  const Arrivals of_sums(&barrier);
  if (thread == 0) of_sums.create();
  __syncwarp();
  if (parts > 1 && thread == 0) {
    // This block finishes every parts-th group of 32 units.
    const int groups = (min(Tile::kRows, o.rows) * (Tile::kOutputs / 4) + kWarp - 1) / kWarp;
    of_sums.expect((groups - part + parts - 1) / parts * parts * kWarp * static_cast<int>(sizeof(FewRowsColumns)));
  }
  // [rank][unit], at the same place in all blocks of the cluster.
  FewRowsColumns* const exchanged = reinterpret_cast<FewRowsColumns*>(context.shared + Tile::shared_bytes(most_chunks));
  const int of_rank = few_rows_exchanged<Tile>(parts);
  // The 32-unit groups of a block are those of its rank, parts, … further. `item` counts what its threads finish.
  constexpr int kCount = finished_at_once<Tile>(), kItems = 4 / kCount;  // items of a unit
  const auto unit_of = [&](int item) {
    const int at = item / kItems;
    return (at / kWarp * parts + part) * kWarp + at % kWarp;
  };
  const auto outputs_of = [&](int item) {
    const int unit = unit_of(item), of_row = Tile::kOutputs / 4;
    return OwnOutputs<kCount>{unit / of_row, first_output + unit % of_row * 4 + item % kItems * kCount};
  };
  OwnOutputs<kCount> own = outputs_of(thread);
  own.load_vectors(a);
  FewRowsMoments moments;
  few_rows_sum<Tile>(
      context, o, first_output, chunks * part / parts, chunks * (part + 1) / parts, most_chunks,
      [&] {
        if (parts > 1) meet_cluster();  // shared memory of the others exists
        await_previous_kernel();
        own.load_residual(a);
        if constexpr (Tile::kNormalised) moments.load(o, own.row, thread);
      },
      [&](int unit, const FewRowsColumns& sums, FewRowsColumns* at) {
        const int group = unit / kWarp;
        if (parts > 1)
          of_sums.send(exchanged + part * of_rank + group / parts * kWarp + lane, group % parts,
                       make_float4(sums.value[0], sums.value[1], sums.value[2], sums.value[3]));
        else
          *at = sums;
      });
  FewRowsStatistics statistics{};
  if constexpr (Tile::kNormalised) statistics = moments.merge(context, o);
  if (parts > 1)
    of_sums.wait();
  else
    __syncthreads();
#pragma unroll 1
  for (int item = thread; item < of_rank * kItems; item += Tile::kThreads) {
    if (item != thread) {
      own = outputs_of(item);
      own.load_vectors(a);
      own.load_residual(a);
      if constexpr (Tile::kNormalised) {
        moments.load(o, own.row, thread);
        statistics = moments.merge(context, o);
      }
    }
    if (unit_of(item - lane) / (Tile::kOutputs / 4) >= o.rows) break;  // of the whole warp
    float sum[kCount] = {};
    if (parts == 1) {
      const float* const from = few_rows_unit<Tile>(context.shared, most_chunks, unit_of(item))->value;
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] = from[item % kItems * kCount + i];
    } else {
      struct alignas(4 * kCount) Sums {
        float value[kCount];
      };
      Sums of_ranks[kFewRowsMostParts];
#pragma unroll
      for (int rank = 0; rank < kFewRowsMostParts; ++rank)
        of_ranks[rank] = reinterpret_cast<const Sums*>(exchanged + min(rank, parts - 1) * of_rank)[item];
#pragma unroll
      for (int rank = 0; rank < kFewRowsMostParts; ++rank)
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] += rank < parts ? of_ranks[rank].value[i] : 0.0f;
    }
    if constexpr (Tile::kNormalised) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] = few_rows_normalised(statistics, sum[i], own.factor[i]);
    }
    finish_outputs<kCount>(a, own.row, own.output, sum, own.bias, own.factor, own.residual);
  }
#endif
}

template <class Tile>
void launch(const Execution& execution, const FewRowsArguments& arguments) {
  const FewRowsOperands& o = arguments.operands;
  const int tiles = (o.outputs + Tile::kOutputs - 1) / Tile::kOutputs,
            chunks = (o.inputs + Tile::kChunk - 1) / Tile::kChunk, parts = few_rows_parts(tiles, chunks);
  if constexpr (Tile::kRows == kMostFewRows && Tile::kOutputs <= kMiddleTile) {
    if (multiply_hopper_rows(execution, arguments, parts, Tile::kTransposed, Tile::kNormalised)) return;
  }
  const int shared = few_rows_shared_bytes<Tile>((chunks + parts - 1) / parts, parts);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(tiles));
  launch_early<FewRowsArguments>(execution, "linear", multiply<Tile>, grid, Tile::kThreads, shared, parts, arguments);
}

template <int kRows>
void launch(const Execution& execution, const FewRowsArguments& arguments, bool transposed) {
  const std::int64_t outputs = arguments.operands.outputs;
  if (arguments.operands.norm.moments != nullptr) {
    if (outputs >= kSeveralOutputs) return launch<FewRowsTile<kRows, kMiddleTile, false, true>>(execution, arguments);
    return launch<FewRowsTile<kRows, kNarrowTile, false, true>>(execution, arguments);
  }
  if (transposed) return launch<FewRowsTile<kRows, kNarrowTile, true>>(execution, arguments);
  if (outputs >= kManyOutputs) return launch<FewRowsTile<kRows, kWideTile, false>>(execution, arguments);
  if (outputs >= kSeveralOutputs) return launch<FewRowsTile<kRows, kMiddleTile, false>>(execution, arguments);
  launch<FewRowsTile<kRows, kNarrowTile, false>>(execution, arguments);
}

/// True for bf16 in rows that begin at multiples of four elements.
bool begins_in_fours(const AnyMatrix& matrix) {
  return matrix.type == Scalar::bf16 && matrix.stride % 4 == 0 && is_aligned(matrix.data, 8);
}

/// True for bf16 in rows of whole 16-byte words.
bool is_in_words(const AnyMatrix& matrix) {
  return matrix.type == Scalar::bf16 && matrix.stride % 8 == 0 && is_aligned(matrix.data, 16);
}

/// True if a product can apply the norm. One with many outputs does not: its tiles have no place for the statistics,
/// and a norm of its own takes a small part of the time of the product.
bool fits_norm(const LinearWeights& weights, const LinearInput& x, const LinearOutput& y) {
  const bool has_terms = weights.norm_terms.sums.size > 0;
  return !weights.transposed && y.rows.columns < kManyOutputs && y.scaled.rows.data == nullptr &&
         (has_terms || !needs_terms(*x.norm)) && is_aligned(weights.norm_terms.sums.data, 16) &&
         is_aligned(weights.norm_terms.bias.data, 16);
}

/// Rows that the product reads.
const AnyMatrix& read_rows(const LinearInput& x) { return x.norm == nullptr ? x.rows : x.normalised; }

void multiply_fitting(const Execution& execution, const LinearWeights& weights, const LinearInput& x,
                      const LinearOutput& y, FewRowsAfter after) {
  const AnyMatrix& rows = read_rows(x);
  const bool has_terms = x.norm != nullptr && needs_terms(*x.norm);
  const Array<const float> bias = has_terms ? weights.norm_terms.bias : weights.bias;
  FewRowsArguments arguments{.operands = {.x = static_cast<const bf16*>(rows.data),
                                          .weight = static_cast<const bf16*>(weights.matrix.data),
                                          .x_stride = rows.stride,
                                          .weight_stride = weights.matrix.stride,
                                          .rows = static_cast<int>(rows.rows),
                                          .outputs = static_cast<int>(y.rows.columns),
                                          .inputs = static_cast<int>(rows.columns)},
                             .bias = bias.size > 0 ? bias.data : nullptr,
                             .factors = has_terms ? weights.norm_terms.sums.data : y.scaled.weight.data,
                             .residual = static_cast<const bf16*>(y.residual.data),
                             .y = static_cast<bf16*>(y.rows.data),
                             .scaled = static_cast<bf16*>(y.scaled.rows.data),
                             .moments = y.moments.data,
                             .residual_stride = y.residual.stride,
                             .y_stride = y.rows.stride,
                             .scaled_stride = y.scaled.rows.stride,
                             .after = after};
  if (x.norm != nullptr)
    arguments.operands.norm = {.moments = x.moments.data,
                               .epsilon = x.norm->epsilon,
                               .share = 1.0f / static_cast<float>(rows.columns),
                               .centred = x.norm->kind == Norm::layer};
  if (!weights.transposed && x.norm == nullptr && y.residual.data == nullptr && after == FewRowsAfter::nothing &&
      y.rows.columns >= kManyOutputs &&
      multiply_many_outputs(execution, {arguments.operands, arguments.bias, arguments.y, arguments.y_stride}))
    return;
  if (x.rows.rows <= 8)
    launch<8>(execution, arguments, weights.transposed);
  else if (x.rows.rows <= 32)
    launch<32>(execution, arguments, weights.transposed);
  else
    launch<kMostFewRows>(execution, arguments, weights.transposed);
}

}  // namespace

bool fits_few_rows(const LinearWeights& weights, const LinearInput& input, const LinearOutput& output) {
  constexpr std::int64_t kMostOutputs = 65535 * kNarrowTile, kMostInputs = std::int64_t{1} << 30;
  const AnyMatrix &x = read_rows(input), &y = output.rows;
  return has_clusters() && x.rows >= 1 && x.rows <= kMostFewRows && is_in_words(x) && is_in_words(weights.matrix) &&
         begins_in_fours(y) && is_aligned(weights.bias.data, 16) && x.columns >= 8 && x.columns % 8 == 0 &&
         x.columns <= kMostInputs && y.columns >= 1 && y.columns <= kMostOutputs &&
         (!weights.transposed || y.columns % 8 == 0) && (input.norm == nullptr || fits_norm(weights, input, output)) &&
         (output.residual.data == nullptr || begins_in_fours(output.residual)) &&
         (output.scaled.rows.data == nullptr ||
          (begins_in_fours(output.scaled.rows) && is_aligned(output.scaled.weight.data, 16)));
}

bool joins_norms(const Execution& /*execution*/, Scalar type, std::int64_t rows, std::int64_t width) {
  return has_clusters() && type == Scalar::bf16 && rows <= kMostFewRows && width % 8 == 0;
}

bool multiply_few_rows(const Execution& execution, const LinearWeights& weights, const LinearInput& x,
                       const LinearOutput& y) {
  if (!fits_few_rows(weights, x, y)) return false;
  multiply_fitting(execution, weights, x, y, FewRowsAfter::nothing);
  return true;
}

bool multiply_few_rows_activated(const Execution& execution, const LinearWeights& weights, const LinearInput& x,
                                 MlpActivation activation, AnyMatrix activated) {
  if (is_gated(activation) || activation == MlpActivation::gelu_exact || !fits_few_rows(weights, x, activated))
    return false;
  multiply_fitting(execution, weights, x, activated,
                   activation == MlpActivation::gelu ? FewRowsAfter::gelu : FewRowsAfter::relu2);
  return true;
}

}  // namespace weft::kernels::cuda
