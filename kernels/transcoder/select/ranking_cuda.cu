// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory, 4 bytes per element of a tile in bf16, which comes from the second-level cache where the tile fits it.
#include "kernels/matrix_cuda.cuh"
#include "kernels/transcoder/select/ranking.hpp"

namespace weft::kernels::cuda {
namespace {

struct Rank {
  AnyMatrix product;
  const float *bias, *norm;

  template <int kWidth>
  __device__ void step(std::int64_t row, std::int64_t column) const {
    float value[kWidth];
    load_columns(product, row, column, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float z = value[i] + __ldg(bias + column + i);
      value[i] = z < 0.0f ? 0.0f : z * __ldg(norm + column + i);
    }
    store_columns(product, row, column, value);
  }
};

struct Standardise {
  AnyMatrix product;
  const float *bias, *mean, *spread;

  template <int kWidth>
  __device__ void step(std::int64_t row, std::int64_t column) const {
    float value[kWidth];
    load_columns(product, row, column, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float z = value[i] + __ldg(bias + column + i), above = z - __ldg(mean + column + i);
      value[i] = z <= 0.0f || above <= 0.0f ? 0.0f : above / __ldg(spread + column + i);
    }
    store_columns(product, row, column, value);
  }
};

}  // namespace

void rank_tile(const Execution& execution, AnyMatrix product, Array<const float> bias, Array<const float> norm) {
  for_vectors(execution, "rank_tile", product.rows, product.columns, vectors_fit(product.columns, product),
              Rank{product, bias.data, norm.data});
}

void standardise_tile(const Execution& execution, AnyMatrix product, Array<const float> bias, Array<const float> mean,
                      Array<const float> spread) {
  for_vectors(execution, "standardise_tile", product.rows, product.columns, vectors_fit(product.columns, product),
              Standardise{product, bias.data, mean.data, spread.data});
}

}  // namespace weft::kernels::cuda
