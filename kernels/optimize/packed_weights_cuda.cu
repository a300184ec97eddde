// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. nf4 reads 0.5 bytes per weight and writes 2, int8 reads 1. Threads of a warp read and write adjacent
// words of 8 columns, several before the first is written.
#include "kernels/matrix_cuda.cuh"
#include "kernels/optimize/packed_weights_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWordsAtOnce = 4;  // that a thread reads before it writes one

template <Packing kPacking>
__global__ void __launch_bounds__(kThreads) unpack_words(ParameterRows p, std::int64_t row_begin, AnyMatrix out) {
  __shared__ float normal[16];
  load_normal_values(normal);
  __syncthreads();
  const std::int64_t per_row = p.columns / kWordColumns, total = out.rows * per_row;
  const auto* const words = static_cast<const PackedWord<kPacking>*>(p.weight) + row_begin * per_row;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * (kThreads * kWordsAtOnce) + threadIdx.x;
  PackedWord<kPacking> word[kWordsAtOnce];
#pragma unroll
  for (int i = 0; i < kWordsAtOnce; ++i)
    if (first + i * kThreads < total) word[i] = __ldcs(words + first + i * kThreads);
#pragma unroll
  for (int i = 0; i < kWordsAtOnce; ++i) {
    const std::int64_t at = first + i * kThreads;
    if (at >= total) return;
    // 32 bits: a division of 64 takes as long as the rest of the word.
    const std::int64_t row = static_cast<std::uint32_t>(at) / static_cast<std::uint32_t>(per_row),
                       column = (at - row * per_row) * kWordColumns;
    float value[kWordColumns];
    unpack_word<kPacking>(word[i], packed_unit_at<kPacking>(p, row_begin + row, column), normal, value);
    store_columns(out, row, column, value);
  }
}

/// Any number of columns, any alignment.
template <Packing kPacking>
__global__ void __launch_bounds__(kThreads) unpack_any(ParameterRows p, std::int64_t row_begin, AnyMatrix out) {
  const std::int64_t total = out.rows * p.columns, bytes = packed_bytes(kPacking, p.columns);
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= total) return;
  const std::int64_t row = at / p.columns, column = at - row * p.columns;
  const std::uint8_t* const codes = static_cast<const std::uint8_t*>(p.weight) + (row_begin + row) * bytes;
  const float code = kPacking == Packing::nf4 ? normal_value(codes[column / 2] >> (column % 2 == 0 ? 4 : 0) & 15)
                                              : static_cast<float>(static_cast<std::int8_t>(codes[column]));
  const float value[1] = {float{to_bf16(__fmul_rn(packed_unit_at<kPacking>(p, row_begin + row, column), code))}};
  store_columns(out, row, column, value);
}

template <Packing kPacking>
void launch(cudaStream_t queue, const ParameterRows& p, std::int64_t row_begin, const AnyMatrix& out) {
  constexpr std::int64_t kMostWords = std::int64_t{1} << 32;
  if (has_packed_words(p) && has_vectors(out) && out.rows * p.columns / kWordColumns < kMostWords)
    unpack_words<kPacking>
        <<<blocks_for(out.rows * p.columns / kWordColumns, kThreads * kWordsAtOnce), kThreads, 0, queue>>>(p, row_begin,
                                                                                                           out);
  else
    unpack_any<kPacking><<<blocks_for(out.rows * p.columns, kThreads), kThreads, 0, queue>>>(p, row_begin, out);
}

/// Kernels that start early read weights before they wait for the kernel before them (launch_cuda.cuh). After this one,
/// which starts when the unpacked weights are in memory, they may.
__global__ void unpacked() {}

}  // namespace

void unpack_weights(const Execution& execution, const ParameterRows& p, std::int64_t row_begin, AnyMatrix out) {
  if (out.rows == 0) return;
  const cudaStream_t queue = stream_of(execution);
  if (p.packing == Packing::nf4)
    launch<Packing::nf4>(queue, p, row_begin, out);
  else
    launch<Packing::int8>(queue, p, row_begin, out);
  unpacked<<<1, 1, 0, queue>>>();
  require_launch("unpack_weights");
}

}  // namespace weft::kernels::cuda
