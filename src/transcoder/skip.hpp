// SPDX-License-Identifier: Apache-2.0
//
// The linear skip connection: every layer adds a linear map of its own input to its target, in normalised space.
//
//   forward    y~_t += W_t x~_t                              W_t [d, d]: output, input
//   backward   dW_t  = sum over tokens n of g[n, t] x~[n, t]^T
//
// Every rank holds all W_t. It adds the product for its own tokens and forms the gradients over the tokens of the whole
// batch, whose inputs and gradient rows it has; so no gradient is exchanged and every rank makes the same update.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/parameters.hpp"
#include "parallel/grid.hpp"
#include "transcoder/model.hpp"
#include "transcoder/settings.hpp"

namespace weft::transcoder {

/// Bytes of workspace of `add_skip` for at most n_tokens, and of `skip_gradient` over at most n_tokens; 0 if the shape
/// has no skip connection.
std::int64_t add_skip_workspace(const Configuration&, const Shape&, kernels::Backend, std::int64_t n_tokens);
std::int64_t skip_gradient_workspace(const Configuration&, const Shape&, std::int64_t n_tokens);

/// reconstruction [n, layers.size() * d] += W_t x~_t for the target layers t of `layers`; x: x~ [n, L * d]. Both fp32
/// or bf16, sums fp32, rounded once.
void add_skip(const kernels::Execution&, std::span<const kernels::ParameterRows> skip, kernels::AnyMatrix x,
              parallel::Range layers, kernels::AnyMatrix reconstruction, kernels::Array<std::byte> workspace);

/// gradient [L * d, d] fp32: dW_t of all layers, one after the other; x and gradient_rows [n, L * d].
void skip_gradient(const kernels::Execution&, kernels::AnyMatrix x, kernels::AnyMatrix gradient_rows,
                   kernels::Matrix<float> gradient, kernels::Array<std::byte> workspace);

/// Adam on all W_t.
void update_skip(const kernels::Execution&, std::span<const kernels::ParameterRows> skip,
                 kernels::Matrix<const float> gradient, const kernels::AdamStep* step);

}  // namespace weft::transcoder
