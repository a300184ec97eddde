// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows on a GPU, as a step of generation has them: few_rows.hpp. Called by try_cuda.
#pragma once

#include "kernels/execution.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/linear/linear_operands.hpp"

namespace weft::kernels::cuda {

/// True if there is a kernel for these operands: bf16 and at most 64 rows, on GPUs from compute capability 9.0 on.
bool fits_few_rows(const LinearWeights&, const LinearInput& x, const LinearOutput& y);

/// kernels::joins_norms.
bool joins_norms(const Execution&, Scalar type, std::int64_t rows, std::int64_t width);

/// Computes y = x Wᵀ + b, with b in fp32. A row does not depend on the number of rows. Weights and biases, also those
/// of a norm, are read while the kernel before it in the stream may still run, so that kernel must not write them.
/// False, and nothing is enqueued, if the operands do not fit.
bool multiply_few_rows(const Execution&, const LinearWeights& weights, const LinearInput& x, const LinearOutput& y);

/// Computes activated = activation(y), for y rounded as it would be stored. False also for gated activations and
/// gelu_exact.
bool multiply_few_rows_activated(const Execution&, const LinearWeights& weights, const LinearInput& x, MlpActivation,
                                 AnyMatrix activated);

}  // namespace weft::kernels::cuda
