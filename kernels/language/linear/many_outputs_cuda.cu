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

/// kRows: of x, the rest are zeros.
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
  static_assert(kRows % 16 == 0 && kRows * kSumsStride * 4 <= kSharedBytes);
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) multiply_many(const __grid_constant__ ManyOutputs o) {
#ifdef WEFT_BEFORE_AMPERE
  __trap();  // no products of bf16; Runtime refuses these GPUs
#else
  allow_next_kernel();
  constexpr int kWords = Tile::kChunk / 8;  // of 16 bytes, of a row in a chunk
  DeviceContext<bf16> context;
  const int thread = context.thread, lane = thread % kWarp, warp = thread / kWarp, matrix = lane / 8,
            of_matrix = lane % 8;
  const int first_output = static_cast<int>(blockIdx.x) * Tile::kOutputs,
            chunks = (o.inputs + Tile::kChunk - 1) / Tile::kChunk;
  const auto stage_of = [](int chunk) { return static_cast<std::uint32_t>(chunk % Tile::kStages * Tile::kStageBytes); };
  const auto load = [&](const bf16* from, std::int64_t stride, int rows, int all, int chunk, std::uint32_t to) {
    for (int i = thread; i < all * kWords; i += Tile::kThreads) {
      const int row = i / kWords, word = i % kWords, input = chunk * Tile::kChunk + 8 * word;
      const bool valid = row < rows && input < o.inputs;
      context.copy16(to + few_rows_place<kWords>(row, word), from + (valid ? row * stride + input : 0), valid);
    }
  };
  const auto load_weight = [&](int chunk) {
    load(o.weight + first_output * o.weight_stride, o.weight_stride, o.outputs - first_output, Tile::kOutputs, chunk,
         stage_of(chunk) + Tile::kRowsBytes);
  };
  const auto load_rows = [&](int chunk) { load(o.x, o.x_stride, o.rows, Tile::kRows, chunk, stage_of(chunk)); };

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
      std::uint32_t b[Tile::kRows / 16][4];
#pragma unroll
      for (int i = 0; i < Tile::kRows / 16; ++i)
        context.load_matrices(
            b[i], rows + few_rows_place<kWords>(16 * i + matrix / 2 * 8 + of_matrix, 2 * inner + matrix % 2));
#pragma unroll
      for (int group = 0; group < Tile::kGroups; ++group) {
        std::uint32_t a[4];
        context.load_matrices(
            a, weight + few_rows_place<kWords>(16 * (Tile::kGroups * warp + group) + matrix % 2 * 8 + of_matrix,
                                               2 * inner + matrix / 2));
#pragma unroll
        for (int i = 0; i < Tile::kRows / 16; ++i) {
          context.multiply(sum[group][2 * i], a, b[i][0], b[i][1]);
          context.multiply(sum[group][2 * i + 1], a, b[i][2], b[i][3]);
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
    const int row = i / kVectors, column = i % kVectors * 8, output = first_output + column;
    if (output >= o.outputs) continue;
    const float4* const from = reinterpret_cast<const float4*>(sums + row * Tile::kSumsStride + column);
    const float4 low = from[0], high = from[1];
    float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (o.bias != nullptr)
#pragma unroll
      for (int c = 0; c < 8; ++c) value[c] += o.bias[output + c];
    *reinterpret_cast<uint4*>(o.y + row * o.y_stride + output) = pack8(value);
  }
#endif
}

int most_shared_bytes() {
  static const int most = [] {
    int device = 0, bytes = 0;
    require(cudaGetDevice(&device), "cudaGetDevice");
    require(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
    return bytes;
  }();
  return most;
}

template <int kRows>
bool launch(const Execution& execution, const ManyOutputs& operands) {
  using Tile = ManyOutputsTile<kRows>;
  if (Tile::kSharedBytes > most_shared_bytes()) return false;
  static const bool once = [] {
    require(cudaFuncSetAttribute(multiply_many<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes),
            "linear: shared memory");
    return true;
  }();
  static_cast<void>(once);
  launch_early<ManyOutputs>(execution, "linear", multiply_many<Tile>,
                            dim3(blocks_for(operands.outputs, Tile::kOutputs)), Tile::kThreads, Tile::kSharedBytes, 1,
                            operands);
  return true;
}

}  // namespace

bool multiply_many_outputs(const Execution& execution, const ManyOutputs& operands) {
  if (operands.rows <= 8 || operands.rows > 64 || operands.outputs % 8 != 0 || operands.y_stride % 8 != 0 ||
      !is_aligned(operands.y, 16))
    return false;
  if (operands.rows <= 16) return launch<16>(execution, operands);
  if (operands.rows <= 32) return launch<32>(execution, operands);
  return launch<64>(execution, operands);
}

}  // namespace weft::kernels::cuda
