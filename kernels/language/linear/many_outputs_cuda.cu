// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory, reading W once. The head of GPT-2 has one block per multiprocessor (131 of 132 on an H200), each with
// copies of 144 KB of W in flight, which begin while the previous kernel still runs. Each block reads all of x from the
// second-level cache; tiles are therefore as wide as registers and shared memory allow.
//
// A warp takes three times 16 outputs and all rows. The order of a sum depends on the inputs alone.
#include "kernels/language/attention/flash_context_cuda.cuh"
#include "kernels/language/linear/few_rows.hpp"
#include "kernels/language/linear/many_outputs_cuda.hpp"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

/// Tile of the product. kRows: rows of x, the rest are zeros.
template <int kRows_>
struct ManyOutputsTile {
  static constexpr int kRows = kRows_, kWarps = 8, kThreads = kWarps * kWarp;
  static constexpr int kGroups = 3, kOutputs = kWarps * kGroups * 16;
  static constexpr int kChunk = 64;  ///< inputs that are loaded together
  static constexpr int kStages = 4;  ///< chunks in shared memory
  static constexpr int kRowsBytes = kRows * kChunk * 2, kStageBytes = kRowsBytes + kOutputs * kChunk * 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  /// Sums are stored as [row][output]. Four floats between rows: the lanes of a warp write to different banks.
  static constexpr int kSumsStride = kOutputs + 4;
  static_assert(kRows % 8 == 0 && kRows * kSumsStride * 4 <= kSharedBytes);
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) multiply_many(const __grid_constant__ ManyOutputs a) {
#ifdef WEFT_BEFORE_AMPERE
  __trap();  // no products of bf16; Runtime rejects these GPUs
#else
  allow_next_kernel();
  constexpr int kWords = Tile::kChunk / 8;  // of 16 bytes, of a row in a chunk
  const FewRowsOperands& o = a.operands;
  DeviceContext<bf16> context;
  const int thread = context.thread, lane = thread % kWarp, warp = thread / kWarp, matrix = lane / 8,
            of_matrix = lane % 8;
  const int first_output = static_cast<int>(blockIdx.x) * Tile::kOutputs,
            chunks = (o.inputs + Tile::kChunk - 1) / Tile::kChunk;
  const auto stage_of = [](int chunk) { return static_cast<std::uint32_t>(chunk % Tile::kStages * Tile::kStageBytes); };
  // The word of each row that this thread copies: the same of every kRowsAtOnce-th row, from one address and to one.
  constexpr int kRowsAtOnce = Tile::kThreads / kWords;
  static_assert(kRowsAtOnce % 8 == 0);  // the permutation of words repeats after 8 rows
  const int first_row = thread / kWords, column = thread % kWords * 8;
  const std::uint32_t place = few_rows_place<kWords>(first_row, thread % kWords);
  const auto load = [&](const bf16* from, std::int64_t stride, int rows, auto all, int chunk, std::uint32_t to) {
    const bool inside = chunk * Tile::kChunk + column < o.inputs;
    const bf16* const of_chunk = from + first_row * stride + column + chunk * Tile::kChunk;
#pragma unroll
    for (int r = 0; r < all; r += kRowsAtOnce) {
      if (all % kRowsAtOnce != 0 && first_row + r >= all) break;
      const bool valid = inside && first_row + r < rows;
      context.copy16(to + place + static_cast<std::uint32_t>(r * kWords * 16), valid ? of_chunk + r * stride : from,
                     valid);
    }
  };
  const auto load_weight = [&](int chunk) {
    load(o.weight + first_output * o.weight_stride, o.weight_stride, o.outputs - first_output,
         std::integral_constant<int, Tile::kOutputs>(), chunk, stage_of(chunk) + Tile::kRowsBytes);
  };
  const auto load_rows = [&](int chunk) {
    load(o.x, o.x_stride, o.rows, std::integral_constant<int, Tile::kRows>(), chunk, stage_of(chunk));
  };

  for (int chunk = 0; chunk < Tile::kStages - 1 && chunk < chunks; ++chunk) load_weight(chunk);
  await_previous_kernel();
  for (int chunk = 0; chunk < Tile::kStages - 1; ++chunk) {
    if (chunk < chunks) load_rows(chunk);
    context.commit();
  }
  float sum[Tile::kGroups][Tile::kRows / 8][4] = {};
  for (int chunk = 0; chunk < chunks; ++chunk) {
    context.wait<Tile::kStages - 2>();
    context.sync();  // this chunk is there for all, and the one before it has been read
    if (const int next = chunk + Tile::kStages - 1; next < chunks) {
      load_weight(next);
      load_rows(next);
    }
    context.commit();
    const std::uint32_t rows = stage_of(chunk), weight = rows + Tile::kRowsBytes;
#pragma unroll
    for (int inner = 0; inner < Tile::kChunk / 16; ++inner) {
      constexpr int kPairs = (Tile::kRows + 8) / 16;  // of eight rows; of a single eight the first half is used
      std::uint32_t b[kPairs][4];
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        context.load_matrices(
            b[i], rows + few_rows_place<kWords>(16 * i + (Tile::kRows == 8 ? 0 : matrix / 2 * 8) + of_matrix,
                                                2 * inner + matrix % 2));
#pragma unroll
      for (int group = 0; group < Tile::kGroups; ++group) {
        std::uint32_t w[4];
        context.load_matrices(
            w, weight + few_rows_place<kWords>(16 * (Tile::kGroups * warp + group) + matrix % 2 * 8 + of_matrix,
                                               2 * inner + matrix / 2));
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          context.multiply(sum[group][2 * i], w, b[i][0], b[i][1]);
          if constexpr (Tile::kRows > 8) context.multiply(sum[group][2 * i + 1], w, b[i][2], b[i][3]);
        }
      }
    }
  }
  context.sync();  // sums take the place of the stages
  float* const sums = reinterpret_cast<float*>(context.shared);
#pragma unroll
  for (int group = 0; group < Tile::kGroups; ++group)
#pragma unroll
    for (int tile = 0; tile < Tile::kRows / 8; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int output = 16 * (Tile::kGroups * warp + group) + i / 2 * 8 + lane / 4,
                  row = 8 * tile + lane % 4 * 2 + i % 2;
        sums[row * Tile::kSumsStride + output] = sum[group][tile][i];
      }
  context.sync();
  constexpr int kVectors = Tile::kOutputs / 8;
  for (int i = thread; i < o.rows * kVectors; i += Tile::kThreads) {
    const int row = i / kVectors, at = i % kVectors * 8, output = first_output + at;
    if (output >= o.outputs) continue;
    const float4* const from = reinterpret_cast<const float4*>(sums + row * Tile::kSumsStride + at);
    const float4 low = from[0], high = from[1];
    float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (a.bias != nullptr)
#pragma unroll
      for (int c = 0; c < 8; ++c) value[c] += a.bias[output + c];
    *reinterpret_cast<uint4*>(a.y + row * a.y_stride + output) = pack8(value);
  }
#endif
}

template <class Tile>
bool launch(const Execution& execution, const ManyOutputs& product) {
  if (Tile::kSharedBytes > most_dynamic_shared_memory(reinterpret_cast<const void*>(multiply_many<Tile>))) return false;
  launch_early<ManyOutputs>(execution, "linear", multiply_many<Tile>,
                            dim3(blocks_for(product.operands.outputs, Tile::kOutputs)), Tile::kThreads,
                            Tile::kSharedBytes, 1, product, {.shared = SharedMemoryOf::this_gpu});
  return true;
}

}  // namespace

bool multiply_many_outputs(const Execution& execution, const ManyOutputs& product) {
  const FewRowsOperands& o = product.operands;
  if (o.rows > 64 || o.outputs % 8 != 0 || product.y_stride % 8 != 0 || !is_aligned(product.y, 16)) return false;
  if (o.rows <= 8) return launch<ManyOutputsTile<8>>(execution, product);
  if (o.rows <= 16) return launch<ManyOutputsTile<16>>(execution, product);
  if (o.rows <= 32) return launch<ManyOutputsTile<32>>(execution, product);
  return launch<ManyOutputsTile<64>>(execution, product);
}

}  // namespace weft::kernels::cuda
