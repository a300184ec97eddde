// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows with packed weights on a GPU, as a step of generation has them.
#pragma once

#include "kernels/execution.hpp"
#include "kernels/language/linear/linear_operands.hpp"

namespace weft::kernels::cuda {

/// True if there is a kernel for these operands: bf16 and at most 64 rows, on GPUs from compute capability 9.0 on.
bool fits_packed_rows(const LinearWeights&, const AnyMatrix& x, const AnyMatrix& y);

/// Computes y = x Wᵀ + b from the codes of W, with sums and b in fp32. A row does not depend on the number of rows.
/// False, and nothing is enqueued, if the operands do not fit.
bool multiply_packed_rows(const Execution&, const LinearWeights&, const AnyMatrix& x, const AnyMatrix& y);

}  // namespace weft::kernels::cuda
