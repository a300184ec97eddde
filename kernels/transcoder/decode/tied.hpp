// SPDX-License-Identifier: Apache-2.0
//
// A decoder tied per source: a feature writes the same vector to its own and every later layer.
//
//   y^[t] = sum over s <= t of p[s]        p[s] = a_s W_s, one product per layer
//   d loss / d p[s] = sum over t >= s of g[t]
//
// So the products are those of a decoder per layer, followed by a running sum over the layers; the backward pass is
// preceded by the reverse running sum.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// rows[n, t] = sum over s <= t of rows[n, s], in place; rows [n, L * d] fp32 or bf16. Sums fp32 in layer order, each
/// result rounded once.
void sum_to_later_layers(const Execution&, AnyMatrix rows, std::int64_t d_model);

/// rows[n, s] = sum over t >= s of rows[n, t], in place; fp32 sums from the last layer on, each result rounded once.
void sum_from_later_layers(const Execution&, AnyMatrix rows, std::int64_t d_model);

}  // namespace weft::kernels
