// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. Bytes per row of C columns in bf16: embed 6 C with learned positions (token, position, out), of which
// the tables come largely from the second-level cache; dropout 4 C, with one call of the generator per 8 columns.
#include "kernels/language/embedding/dropout.hpp"
#include "kernels/language/embedding/embedding.hpp"
#include "kernels/language/rows_cuda.cuh"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

struct Embed {
  AnyMatrix tokens, positions, out;
  std::int64_t first_id;
  const std::uint32_t* ids;
  const std::int32_t* position;
  std::int64_t columns;

  template <int kWidth>
  __device__ void step(std::int64_t row, std::int64_t column) const {
    float value[kWidth] = {};
    const std::int64_t id = static_cast<std::int64_t>(ids[row]) - first_id;
    if (id >= 0 && id < tokens.rows) load_columns(tokens, id, column, value);
    if (positions.data != nullptr) {
      float place[kWidth];
      load_columns(positions, position[row], column, place);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) value[i] += place[i];
    }
    store_columns(out, row, column, value);
  }
};

/// First kernel of a step. Later ones start after its wait, hence after all kernels of the step before have ended.
template <int kWidth>
__global__ void embed_rows(const __grid_constant__ Embed embed) {
  await_previous_kernel();
  allow_next_kernel();
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kWidth;
  if (column < embed.columns) embed.step<kWidth>(blockIdx.x, column);
}

struct Dropout {
  AnyMatrix x;
  DropoutRule rule;
  std::uint32_t site;
  std::int64_t first_row;
  const AdamStep* constants;

  template <int kWidth>
  __device__ void step(std::int64_t row, std::int64_t column) const {
    static_assert(kWidth == 1 || kWidth == kColumnsPerMask);
    const Random4 random =
        dropout_bits(constants->seed, constants->step, site, first_row + row, column / kColumnsPerMask);
    float value[kWidth];
    load_columns(x, row, column, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      value[i] *= dropout_factor(rule, random, kWidth == 1 ? static_cast<int>(column % kColumnsPerMask) : i);
    store_columns(x, row, column, value);
  }
};

}  // namespace

void embed(const Execution& execution, AnyMatrix tokens, std::int64_t first_id, Array<const std::uint32_t> ids,
           AnyMatrix positions, Array<const std::int32_t> position, AnyMatrix out) {
  if (out.rows == 0 || out.columns == 0) return;
  const bool vectors = vectors_fit(out.columns, tokens, positions, out);
  const auto [grid, threads] = vector_blocks(out.rows, out.columns, vectors);
  launch_early<Embed>(execution, "embed", vectors ? embed_rows<8> : embed_rows<1>, grid, threads, 0, 1,
                      {tokens, positions, out, first_id, ids.data, position.data, out.columns});
}

void dropout(const Execution& execution, const DropoutSite& site, const AdamStep* step, AnyMatrix x) {
  const DropoutRule rule = dropout_rule(site.probability);
  if (rule.kept == kMaskRange) return;
  for_vectors(execution, "dropout", x.rows, x.columns, vectors_fit(x.columns, x),
              Dropout{x, rule, site.site, site.first_row, step});
}

}  // namespace weft::kernels::cuda
