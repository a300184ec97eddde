// SPDX-License-Identifier: Apache-2.0
//
// Copies of weights in fp16, for products with fp16 activations: the dense library takes operands of one type.
#pragma once

#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::kernels {

/// out [rows, columns] = the weights, rounded to nearest from their exact values: fp32 weights in two planes are joined
/// first. A weight beyond 65504 becomes infinite.
void weights_to_half(const Execution&, const ParameterRows& parameters, Matrix<half> out);

}  // namespace weft::kernels
