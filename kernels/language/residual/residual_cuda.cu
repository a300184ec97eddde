// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. Bytes per element in bf16: bias 4, sum of rows 6, scale 4. The bias comes from the first-level cache.
#include "kernels/language/residual/residual.hpp"
#include "kernels/language/rows_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

struct Bias {
  AnyMatrix rows;
  const float* bias;

  template <int kWidth>
  __device__ void step(std::int64_t row, std::int64_t column) const {
    float value[kWidth];
    load_columns(rows, row, column, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] += __ldg(bias + column + i);
    store_columns(rows, row, column, value);
  }
};

struct Scale {
  AnyMatrix rows;
  float factor;

  template <int kWidth>
  __device__ void step(std::int64_t row, std::int64_t column) const {
    float value[kWidth];
    load_columns(rows, row, column, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] *= factor;
    store_columns(rows, row, column, value);
  }
};

struct Sum {
  AnyMatrix x, addend, sum;

  template <int kWidth>
  __device__ void step(std::int64_t row, std::int64_t column) const {
    float value[kWidth], other[kWidth];
    load_columns(x, row, column, value);
    load_columns(addend, row, column, other);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] += other[i];
    store_columns(sum, row, column, value);
  }
};

}  // namespace

void add_bias(const Execution& execution, AnyMatrix rows, Array<const float> bias) {
  for_vectors(execution, "add_bias", rows.rows, rows.columns, vectors_fit(rows.columns, rows), Bias{rows, bias.data});
}

void add_rows(const Execution& execution, AnyMatrix x, AnyMatrix addend, AnyMatrix sum) {
  for_vectors(execution, "add_rows", sum.rows, sum.columns, vectors_fit(sum.columns, x, addend, sum),
              Sum{x, addend, sum});
}

void scale_rows(const Execution& execution, AnyMatrix rows, float factor) {
  for_vectors(execution, "scale_rows", rows.rows, rows.columns, vectors_fit(rows.columns, rows), Scale{rows, factor});
}

}  // namespace weft::kernels::cuda
