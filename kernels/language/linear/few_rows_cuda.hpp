// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows on a GPU, as a step of generation has them: few_rows.hpp. Called by try_cuda.
#pragma once

#include "kernels/execution.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/linear/linear_weights.hpp"

namespace weft::kernels::cuda {

/// True if there is a kernel for these operands: bf16 and at most 64 rows, on GPUs from compute capability 9.0 on.
bool fits_few_rows(const LinearWeights&, AnyMatrix x, AnyMatrix y);

/// Computes y = x Wᵀ + b, with b in fp32. A row does not depend on the number of rows. Weights and biases are read
/// while the kernel before it in the stream may still run, so that kernel must not write them. False, and nothing is
/// enqueued, if the operands do not fit.
bool multiply_few_rows(const Execution&, const LinearWeights& weights, AnyMatrix x, AnyMatrix y);

/// Computes activated = activation(y), for y rounded as it would be stored. False also for gated activations.
bool multiply_few_rows_activated(const Execution&, const LinearWeights& weights, AnyMatrix x, MlpActivation,
                                 AnyMatrix activated);

}  // namespace weft::kernels::cuda
