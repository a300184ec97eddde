// SPDX-License-Identifier: Apache-2.0
//
// Activations of the MLP (mlp_activation.hpp) whose results are operands of products in 8 bits (gemm/fp8.hpp): coded as
// they are formed, from the values that a matrix of the type of `y` or `dx` would keep.
#pragma once

#include "kernels/gemm/fp8.hpp"
#include "kernels/language/activation/mlp_activation.hpp"

namespace weft::kernels {

/// Codes y of mlp_activation, in e4m3. y: memory in which it is formed, or not.
WEFT_KERNEL(code_activation, void(const Execution&, MlpActivation, AnyMatrix x, AnyMatrix y, const Coding&));

/// Codes dx of mlp_activation_backward, in e5m2. dx: memory in which it is formed, or not; it may be x.
WEFT_KERNEL(code_activation_backward,
            void(const Execution&, MlpActivation, AnyMatrix x, AnyMatrix dy, AnyMatrix dx, const Coding&));

}  // namespace weft::kernels
