// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory, one pass.
#include "kernels/convert/convert_rows.hpp"
#include "kernels/matrix_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 8;  // that share one read of mean and scale
constexpr int kRowsAtOnce = 4;     // that a thread loads before it stores one

template <int kWidth, Scalar kRaw>
__global__ void __launch_bounds__(kThreads)
    normalise(AnyMatrix raw, const float* mean, const float* scale, AnyMatrix out, std::int32_t* flag) {
  raw.type = kRaw;  // a constant: loads of several rows without a branch between them
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
  for (std::int64_t row = begin; row < end; row += kRowsAtOnce) {
    float value[kRowsAtOnce][kWidth];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r)
      if (row + r < end) load_columns(raw, row + r, column, value[r]);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (row + r >= end) break;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        finite = finite && is_finite(value[r][i]);
        value[r][i] = (value[r][i] - centre[i]) * factor[i];
      }
      store_columns(out, row + r, column, value[r]);
    }
  }
  if (!finite) atomicOr(flag, 1);
}

template <int kWidth>
void launch_normalise(cudaStream_t queue, const AnyMatrix& raw, const float* mean, const float* scale,
                      const AnyMatrix& out, std::int32_t* flag) {
  const auto kernel = raw.type == Scalar::fp32   ? normalise<kWidth, Scalar::fp32>
                      : raw.type == Scalar::fp16 ? normalise<kWidth, Scalar::fp16>
                                                 : normalise<kWidth, Scalar::bf16>;
  kernel<<<dim3(blocks_for(raw.rows, kRowsPerThread), blocks_for(raw.columns, kThreads * kWidth)), kThreads, 0,
           queue>>>(raw, mean, scale, out, flag);
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
  // Four columns per thread: a warp reads and writes whole lines, also of fp32.
  if (raw.columns % 4 == 0 && has_vectors(raw) && has_vectors(out))
    launch_normalise<4>(stream_of(execution), raw, mean.data, scale.data, out, flag);
  else
    launch_normalise<1>(stream_of(execution), raw, mean.data, scale.data, out, flag);
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
