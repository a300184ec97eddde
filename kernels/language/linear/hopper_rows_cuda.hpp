// SPDX-License-Identifier: Apache-2.0
//
// Products of 33 to 64 rows on GPUs of compute capability 9.0 (hopper_rows_cuda.cu).
#pragma once

#include "kernels/execution.hpp"

namespace weft::kernels::cuda {

struct FewRowsArguments;

/// The product of few_rows_cuda.hpp with `parts` blocks per tile, with the same bits. False: not of this shape or GPU,
/// nothing was done.
bool multiply_hopper_rows(const Execution&, const FewRowsArguments&, int parts, bool transposed, bool normalised);

}  // namespace weft::kernels::cuda
