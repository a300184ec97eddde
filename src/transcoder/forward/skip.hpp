// SPDX-License-Identifier: Apache-2.0
//
// The linear skip connection in the forward pass: every layer adds a linear map of its own input to its target, in
// normalised space. Its gradient: parts/skip_gradient.hpp.
//
//   y~_t += W_t x~_t                              W_t [d, d]: output, input
#pragma once

#include <cstdint>
#include <span>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "parallel/grid.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

/// Bytes of workspace of `add_skip` for at most n_tokens; 0 if the shape has no skip connection.
std::int64_t add_skip_workspace(const Configuration&, const Shape&, kernels::Backend, std::int64_t n_tokens);

/// Adds W_t x~_t to reconstruction [n, layers.size() * d] for the target layers t of `layers`; x: x~ [n, L * d]. Both
/// are fp32 or bf16; sums are fp32 and rounded once.
void add_skip(const kernels::Execution&, std::span<const kernels::ParameterRows> skip, kernels::AnyMatrix x,
              parallel::Range layers, kernels::AnyMatrix reconstruction, kernels::Array<std::byte> workspace);

}  // namespace weft::transcoder
