// SPDX-License-Identifier: Apache-2.0
//
// Means over ranges of rows: embeddings of texts from hidden states.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// out[to, j] += scale * sum over rows [begin, end) of in[i, j].
struct PooledRows {
  std::int64_t begin = 0, end = 0, to = 0;
  float scale = 1;
};

/// Writes the pooled row of every range to row `to` of `out`; no two ranges have the same `to`. in: fp32, bf16 or fp16.
/// Sums are fp32, in the order of the rows.
void pool_rows(const Execution&, AnyMatrix in, Array<const PooledRows> ranges, Matrix<float> out);

}  // namespace weft::kernels
