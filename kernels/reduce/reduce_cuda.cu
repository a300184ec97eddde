// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. Bytes per element in bf16: 2 (n_parts + 1).
#include "kernels/matrix_cuda.cuh"
#include "kernels/reduce/reduce.hpp"

namespace weft::kernels::cuda {
namespace {

struct Parts {
  AnyMatrix parts, out;
  int n_parts;

  template <int kWidth>
  __device__ void step(std::int64_t row, std::int64_t column) const {
    float sum[kWidth];
    load_columns(parts, row, column, sum);
    for (int p = 1; p < n_parts; ++p) {
      float value[kWidth];
      load_columns(parts, p * out.rows + row, column, value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += value[i];
    }
    store_columns(out, row, column, sum);
  }
};

}  // namespace

void sum_parts(const Execution& execution, AnyMatrix parts, std::int64_t n_parts, AnyMatrix out) {
  for_vectors(execution, "sum_parts", out.rows, out.columns, vectors_fit(out.columns, parts, out),
              Parts{parts, out, static_cast<int>(n_parts)});
}

}  // namespace weft::kernels::cuda
