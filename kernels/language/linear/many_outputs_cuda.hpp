// SPDX-License-Identifier: Apache-2.0
//
// y = x Wᵀ + b of 9 to 64 rows with many outputs, such as the logits of a step of generation: few_rows_cuda.cu calls
// it.
#pragma once

#include <cstdint>

#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels::cuda {

/// x [rows, inputs], W [outputs, inputs], y [rows, outputs]. Strides of x and W are multiples of 8 elements, so are
/// their addresses and `inputs`.
struct ManyOutputs {
  const bf16 *x, *weight;
  const float* bias;  ///< [outputs], or null
  bf16* y;
  std::int64_t x_stride, weight_stride, y_stride;
  int rows, outputs, inputs;
};

/// False, with nothing enqueued, for other numbers of rows, where y is not in whole 16-byte words, and on GPUs with
/// less shared memory than the kernel needs. A row has the same bits as from multiply_few_rows.
bool multiply_many_outputs(const Execution&, const ManyOutputs&);

}  // namespace weft::kernels::cuda
