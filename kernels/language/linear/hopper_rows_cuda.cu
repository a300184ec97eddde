// SPDX-License-Identifier: Apache-2.0
//
// Limit: the latencies between the end of the kernel before and the last store, and the bytes of rows that blocks read
// from the second-level cache: each reads all 64 rows of its inputs. Products are formed by warpgroup instructions (PTX
// ISA, wgmma) from shared memory. All chunks of a block are in shared memory at once; what a thread sends and finishes,
// and where, is known before the kernel before has ended.
//
// The blocks of a cluster have the same inputs as those of few_rows_cuda.cu, and groups of 16 inputs are added in the
// same order: four chains of every fourth group, then the chains in their order. A row has the same bits.
#include <utility>

#include "kernels/hopper_cuda.cuh"
#include "kernels/language/linear/few_rows_finish_cuda.cuh"
#include "kernels/language/linear/hopper_rows_cuda.hpp"

namespace weft::kernels::cuda {
namespace {

/// Tile with the member names of FewRowsTile, whose functions load the weights.
template <int kParts_, bool kTransposed_, bool kNormalised_ = false>
struct HopperRowsTile {
  static constexpr int kParts = kParts_, kRows = 64, kOutputs = 64;
  static constexpr bool kTransposed = kTransposed_, kNormalised = kNormalised_;
  static constexpr int kThreads = 2 * kWarpgroup, kColumns = kOutputs / 2;  ///< outputs of a warpgroup
  static constexpr int kChunk = kSwizzledColumns, kGroups = kChunk / 16;
  static constexpr int kStages = kTransposed ? 6 : 4;  ///< most chunks of a block: all are in shared memory
  static constexpr int kRowsBytes = kRows * kChunk * 2, kStageBytes = kRowsBytes + kOutputs * kChunk * 2;
  static_assert(kStageBytes % kSwizzleAlignment == 0);
  static_assert(!kTransposed || kOutputs == kSwizzledColumns);
  // A warpgroup's part of the weights: outputs in rows of a chunk, or columns of one panel of swizzled columns.
  static constexpr int kWeightsOfWarpgroup = kTransposed ? kColumns * 2 : kColumns * kChunk * 2,
                       kWeightsOfGroup = kTransposed ? 16 * kOutputs * 2 : 16 * 2;
};

/// Sums that a block gets from each block of its cluster: of its rows, four successive outputs of a row in a unit. The
/// units of eight outputs lie together, row by row; two units between them: lanes read from different banks.
template <class Tile>
struct HopperSums {
  static constexpr int kRows = Tile::kRows / Tile::kParts;  ///< that a block finishes
  static constexpr int kOfEight = 2 * kRows + 2, kUnits = Tile::kOutputs / 8 * kOfEight;
  static constexpr int kBytes = kUnits * 16;
  WEFT_HOST_DEVICE static constexpr int at(int row, int unit) { return unit / 2 * kOfEight + 2 * row + unit % 2; }
  static_assert(kRows * Tile::kOutputs / 4 <= Tile::kThreads);  // a thread finishes one unit at most
};

template <class Tile>
int shared_bytes(int most_chunks) {
  return most_chunks * Tile::kStageBytes + Tile::kParts * HopperSums<Tile>::kBytes +
         2 * Tile::kOutputs * static_cast<int>(sizeof(float)) + static_cast<int>(sizeof(std::uint64_t));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// clang-format off
#define WEFT_SUMS_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define WEFT_SUMS_16(c, i) WEFT_SUMS_4(c, i), WEFT_SUMS_4(c, i + 4), WEFT_SUMS_4(c, i + 8), WEFT_SUMS_4(c, i + 12)
// clang-format on
/// c = (adds ? c : 0) + a b with 16 terms: a has 64 rows, b 32 columns, with the contiguous axis of the columns if
/// `transposed`, else of the terms as that of a. Places of sums: hopper_cuda.cuh, multiply.
template <bool transposed>
__device__ __forceinline__ void multiply_columns(float (&c)[16], std::uint64_t a, std::uint64_t b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, adds, 1, 1, 0, %19;\n}"
      : WEFT_SUMS_16(c, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(transposed ? 1 : 0)
      : "memory");
}
#undef WEFT_SUMS_16
#undef WEFT_SUMS_4
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2) multiply_rows(const __grid_constant__ FewRowsArguments a) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __trap();  // compiled for 90a alone
#else
  allow_next_kernel();
  constexpr int kParts = Tile::kParts;
  using OfPart = HopperSums<Tile>;
  const FewRowsOperands& o = a.operands;
  const int part = static_cast<int>(blockIdx.x), first_output = static_cast<int>(blockIdx.y) * Tile::kOutputs;
  const int chunks = (o.inputs + Tile::kChunk - 1) / Tile::kChunk, most_chunks = (chunks + kParts - 1) / kParts,
            begin = chunks * part / kParts, count = chunks * (part + 1) / kParts - begin;
  DeviceContext<bf16> context;
  const int thread = context.thread, lane = thread % kWarp, warp = thread / kWarp,
            warpgroup = __shfl_sync(kAllLanes, thread / kWarpgroup, 0);
  if (context.base % kSwizzleAlignment != 0) __trap();
  FewRowsColumns* const exchanged = reinterpret_cast<FewRowsColumns*>(context.shared + most_chunks * Tile::kStageBytes);
  FewRowsColumns* const vectors = exchanged + kParts * OfPart::kUnits;  // biases of the outputs, then their factors
  constexpr int kUnits = Tile::kOutputs / 4;
  const Arrivals of_sums(reinterpret_cast<std::uint64_t*>(vectors + 2 * kUnits));
  if (thread == 0) of_sums.create();
  __syncwarp();
  if (thread == 0) of_sums.expect(Tile::kRows * Tile::kOutputs * static_cast<int>(sizeof(float)));

  const FewRowsWords<Tile> words(thread, o, first_output, begin);
#pragma unroll 1
  for (int i = 0; i < count; ++i) few_rows_load_weight<Tile>(context, o, words, first_output, begin + i, i, i);
  if (thread < 2 * kUnits) {
    const float* const from = thread < kUnits ? a.bias : a.factors;
    const int output = first_output + 4 * (thread % kUnits);
    const bool valid = from != nullptr && output < o.outputs;
    context.copy16(static_cast<std::uint32_t>(reinterpret_cast<unsigned char*>(vectors + thread) - context.shared),
                   valid ? from + output : static_cast<const void*>(o.x), valid);
  }
  // Outputs that this thread finishes: a warp has four rows and 32 outputs.
  const int unit = warp / (OfPart::kRows / 4) * 8 + lane % 8, row_of_part = warp % (OfPart::kRows / 4) * 4 + lane / 8;
  const bool finishes = unit < kUnits;
  const FewRowsColumns* const own_sums = exchanged + OfPart::at(row_of_part, unit);
  // Sums that it sends: lanes swap pairs of sums with their neighbours, then each has four successive outputs of a
  // row.
  const int odd = lane % 2, row = warp % 4 * 16 + lane / 4 + 8 * odd;
  const Arrivals::Place there =
      of_sums.place(exchanged + part * OfPart::kUnits +
                        OfPart::at(row % OfPart::kRows, warpgroup * (Tile::kColumns / 4) + lane % 4 / 2),
                    row / OfPart::kRows);
  OwnOutputs<4> own{part * OfPart::kRows + row_of_part, first_output + 4 * unit};
  meet_cluster();  // shared memory of the others exists
  await_previous_kernel();
  FewRowsMoments moments;
  if (finishes) {  // whole warps; eight lanes have a row
    own.load_residual(a);
    if constexpr (Tile::kNormalised) moments.load(o, own.row, thread);
  }
#pragma unroll
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    if (stage < count) {
#pragma unroll
      for (int r = 0; r < Tile::kRows; r += FewRowsWords<Tile>::kRowsAtOnce) {
        const bool valid = words.row + r < o.rows && stage * Tile::kChunk < words.x_inputs;
        context.copy16(words.place + static_cast<std::uint32_t>(stage * Tile::kStageBytes + r * Tile::kChunk * 2),
                       valid ? words.x + r * o.x_stride + stage * Tile::kChunk : o.x, valid);
      }
    }
    context.commit();
  }
  constexpr int kSums = Tile::kColumns / 2;
  float sums[Tile::kGroups][kSums];
  const std::uint64_t of_rows = operand_at(context.base, 0),
                      of_weights =
                          operand_at(context.base + Tile::kRowsBytes + warpgroup * Tile::kWeightsOfWarpgroup, 0);
  const auto add_stage = [&](auto stage) {
    if (stage >= count) return;
    context.template wait<Tile::kStages - 1 - stage>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // products read what threads have written
    context.sync();
    begin_products();
#pragma unroll
    for (int group = 0; group < Tile::kGroups; ++group)
      multiply_columns<Tile::kTransposed>(sums[group], of_rows + (stage * Tile::kStageBytes + group * 32) / 16,
                                          of_weights + (stage * Tile::kStageBytes + group * Tile::kWeightsOfGroup) / 16,
                                          stage > 0);
    commit_products();
  };
  const auto add_stages = [&]<int... stages>(std::integer_sequence<int, stages...>) {
    (add_stage(std::integral_constant<int, stages>()), ...);
  };
  add_stages(std::make_integer_sequence<int, Tile::kStages>());
  wait_products<0>();
#pragma unroll
  for (int group = 0; group < Tile::kGroups; ++group) fence_sums(sums[group]);

#pragma unroll
  for (int i = 0; i < kSums; i += 4) {
    float value[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) value[k] = sums[0][i + k] + sums[1][i + k] + sums[2][i + k] + sums[3][i + k];
    const float x = __shfl_xor_sync(kAllLanes, odd ? value[0] : value[2], 1),
                y = __shfl_xor_sync(kAllLanes, odd ? value[1] : value[3], 1);
    of_sums.send(there, i / 4 * OfPart::kOfEight * 16,
                 odd ? make_float4(x, y, value[2], value[3]) : make_float4(value[0], value[1], x, y));
  }
  FewRowsStatistics statistics{};
  if (Tile::kNormalised && finishes) statistics = moments.merge(context, o);
  of_sums.wait();
  if (finishes) {
    float sum[4] = {};
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const FewRowsColumns of_block = own_sums[p * OfPart::kUnits];
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += of_block.value[i];
    }
    if constexpr (Tile::kNormalised) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = few_rows_normalised(statistics, sum[i], vectors[kUnits + unit].value[i]);
    }
    finish_outputs<4>(a, own.row, own.output, sum, vectors[unit].value, vectors[kUnits + unit].value, own.residual);
  }
#endif
}

template <class Tile>
bool launch(const Execution& execution, const FewRowsArguments& arguments) {
  const FewRowsOperands& o = arguments.operands;
  const int tiles = (o.outputs + Tile::kOutputs - 1) / Tile::kOutputs,
            chunks = (o.inputs + Tile::kChunk - 1) / Tile::kChunk,
            most_chunks = (chunks + Tile::kParts - 1) / Tile::kParts;
  if (most_chunks > Tile::kStages) return false;
  launch_early<FewRowsArguments>(
      execution, "linear", multiply_rows<Tile>, dim3(static_cast<unsigned>(Tile::kParts), static_cast<unsigned>(tiles)),
      Tile::kThreads, shared_bytes<Tile>(most_chunks), Tile::kParts, arguments, {.shared = SharedMemoryOf::this_gpu});
  return true;
}

}  // namespace

bool multiply_hopper_rows(const Execution& execution, const FewRowsArguments& arguments, int parts, bool transposed,
                          bool normalised) {
  if (!is_hopper() || arguments.operands.outputs % 4 != 0) return false;
  if (normalised) return parts == 4 && launch<HopperRowsTile<4, false, true>>(execution, arguments);
  if (!transposed) return parts == 4 && launch<HopperRowsTile<4, false>>(execution, arguments);
  if (parts == 4) return launch<HopperRowsTile<4, true>>(execution, arguments);
  return parts == 8 && launch<HopperRowsTile<8, true>>(execution, arguments);
}

}  // namespace weft::kernels::cuda
