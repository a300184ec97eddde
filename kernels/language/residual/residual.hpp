// SPDX-License-Identifier: Apache-2.0
//
// Element-wise sums of rows: the bias of a product, and the residual stream where no norm follows that forms the sum
// (norm/norm.hpp).
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// rows[n, j] += bias[j]. fp32 or bf16, the sum in fp32.
void add_bias(const Execution&, AnyMatrix rows, Array<const float> bias);

/// sum = x + addend, of equal shapes, each fp32 or bf16. `sum` may be x or addend.
void add_rows(const Execution&, AnyMatrix x, AnyMatrix addend, AnyMatrix sum);

}  // namespace weft::kernels
