// SPDX-License-Identifier: Apache-2.0
//
// y = x Wᵀ + b of few rows with many outputs, such as the logits of a step of generation: few_rows_cuda.cu calls it.
#pragma once

#include "kernels/execution.hpp"
#include "kernels/language/linear/few_rows.hpp"

namespace weft::kernels::cuda {

struct ManyOutputs {
  FewRowsOperands operands;
  const float* bias;  ///< [outputs], or null
  bf16* y;            ///< [rows, outputs]
  std::int64_t y_stride;
};

/// False, with nothing enqueued, for more than 64 rows, where y is not in whole 16-byte words, and on GPUs with less
/// shared memory than the kernel needs. A row has the same bits whatever the number of rows.
bool multiply_many_outputs(const Execution&, const ManyOutputs&);

}  // namespace weft::kernels::cuda
