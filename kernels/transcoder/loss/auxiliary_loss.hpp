// SPDX-License-Identifier: Apache-2.0
//
// The auxiliary loss of dead features (AuxK; Gao et al. 2024, arXiv 2406.04093, section A.2, for a cross-layer
// decoder): dead features reconstruct the remaining error of the active ones, e = y - y^, which counts as a constant.
//
//   b~[f]     = b[f] if f is dead, else -infinity       pre-activations with b~ rank dead features alone
//   e^        = the decoder applied to the largest of them, without bias
//   loss      = coefficient * (sum over layers of the mean over tokens and dimensions of (e^ - e)^2)
//   u = d loss / d e^ = coefficient * (factor e^ + g)   g = -factor e, the gradient row of the reconstruction's loss
//
// factor = 2 / (N d) as in loss.hpp, so loss = N d / (4 coefficient) * sum of u^2.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// masked[i, j] = bias[i, j] where clocks[i * columns + j] >= window, else -infinity. bias, masked: [layers, features]
/// fp32.
void mask_alive(const Execution&, Matrix<const float> bias, Array<const std::int64_t> clocks, std::int64_t window,
                Matrix<float> masked);

/// Overwrites rows [n, columns] (fp32 or bf16) with u. partial: n_parts matrices [n, columns] one after the other,
/// added in this order in fp32: e^; gradient_rows [n, columns]: g. squares[i] += sum of u^2 of row i before rounding.
void auxiliary_rows(const Execution&, AnyMatrix partial, std::int64_t n_parts, AnyMatrix gradient_rows, float factor,
                    float coefficient, AnyMatrix rows, Array<double> squares);

}  // namespace weft::kernels
