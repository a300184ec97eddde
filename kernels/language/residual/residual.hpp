// SPDX-License-Identifier: Apache-2.0
//
// Element-wise operations on rows: the bias of a product, the residual stream where no norm follows that forms the sum
// (norm/norm.hpp), and the scale of an embedding.
#pragma once

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

/// rows[n, j] += bias[j]. fp32, bf16 or fp16, the sum in fp32.
WEFT_KERNEL(add_bias, void(const Execution&, AnyMatrix rows, Array<const float> bias));

/// sum = x + addend, of equal shapes, each fp32, bf16 or fp16. `sum` may be x or addend.
WEFT_KERNEL(add_rows, void(const Execution&, AnyMatrix x, AnyMatrix addend, AnyMatrix sum));

/// rows[n, j] *= factor. fp32, bf16 or fp16, the product in fp32.
WEFT_KERNEL(scale_rows, void(const Execution&, AnyMatrix rows, float factor));

}  // namespace weft::kernels
