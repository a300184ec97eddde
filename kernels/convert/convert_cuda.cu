// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory, one pass.
#include "kernels/convert/convert.hpp"
#include "kernels/matrix_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 8;  // that share one read of mean and scale

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    normalise(AnyMatrix raw, const float* mean, const float* scale, AnyMatrix out, std::int32_t* flag) {
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kWidth;
  if (column >= raw.columns) return;
  float centre[kWidth], factor[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    centre[i] = mean[column + i];
    factor[i] = scale[column + i];
  }
  bool finite = true;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kRowsPerThread;
  const std::int64_t end = min(begin + kRowsPerThread, raw.rows);
  for (std::int64_t row = begin; row < end; ++row) {
    float value[kWidth];
    load_columns(raw, row, column, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      finite = finite && is_finite(value[i]);
      value[i] = (value[i] - centre[i]) * factor[i];
    }
    store_columns(out, row, column, value);
  }
  if (!finite) atomicOr(flag, 1);
}

/// One thread per word; `columns` and strides count words.
template <class Word>
__global__ void __launch_bounds__(kThreads) copy(const Word* in, std::int64_t in_stride, Word* out,
                                                 std::int64_t out_stride, std::int64_t rows, std::int64_t columns) {
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= columns) return;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kRowsPerThread;
  const std::int64_t end = min(begin + kRowsPerThread, rows);
  for (std::int64_t row = begin; row < end; ++row)
    out[row * out_stride + column] = __ldcs(in + row * in_stride + column);
}

template <class Word>
void launch_copy(cudaStream_t queue, const AnyMatrix& in, const AnyMatrix& out) {
  const std::int64_t words = bytes_of(in.type) * in.columns / static_cast<std::int64_t>(sizeof(Word));
  const auto stride = [](const AnyMatrix& m) {
    return bytes_of(m.type) * m.stride / static_cast<std::int64_t>(sizeof(Word));
  };
  copy<<<dim3(blocks_for(in.rows, kRowsPerThread), blocks_for(words, kThreads)), kThreads, 0, queue>>>(
      static_cast<const Word*>(in.data), stride(in), static_cast<Word*>(out.data), stride(out), in.rows, words);
}

}  // namespace

void normalise_rows(const Execution& execution, AnyMatrix raw, Array<const float> mean, Array<const float> scale,
                    AnyMatrix out, std::int32_t* flag) {
  if (raw.rows == 0 || raw.columns == 0) return;
  const cudaStream_t queue = stream_of(execution);
  const bool wide = raw.columns % 8 == 0 && has_vectors(raw) && has_vectors(out);
  const dim3 grid(blocks_for(raw.rows, kRowsPerThread), blocks_for(raw.columns, kThreads * (wide ? 8 : 1)));
  if (wide)
    normalise<8><<<grid, kThreads, 0, queue>>>(raw, mean.data, scale.data, out, flag);
  else
    normalise<1><<<grid, kThreads, 0, queue>>>(raw, mean.data, scale.data, out, flag);
  require_launch("normalise_rows");
}

void copy_rows(const Execution& execution, AnyMatrix in, AnyMatrix out) {
  if (in.rows == 0 || in.columns == 0) return;
  const std::int64_t element = bytes_of(in.type);
  const auto wide = [&](const AnyMatrix& m) { return m.stride * element % 16 == 0 && is_aligned(m.data, 16); };
  if (in.columns * element % 16 == 0 && wide(in) && wide(out))
    launch_copy<uint4>(stream_of(execution), in, out);
  else
    launch_copy<std::uint16_t>(stream_of(execution), in, out);  // every type of rows is a multiple of 2 bytes
  require_launch("copy_rows");
}

}  // namespace weft::kernels::cuda
