// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows on a GPU, as a step of generation has them: few_rows.hpp.
#pragma once

#include <optional>

#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/linear/linear.hpp"

namespace weft::kernels::cuda {

/// What follows a product: `activated` [n, outputs] from y as stored. Of the activations without gate.
struct ActivationAfter {
  MlpActivation kind;
  AnyMatrix activated;
};

/// y = x Wᵀ + b, with b in fp32, for bf16 and at most 64 rows, on GPUs from compute capability 9.0 on. False where
/// types, sizes, alignment or the GPU do not fit: nothing is enqueued then. A row does not depend on the number of
/// rows. W is read while the kernel before it in the stream may still run, so that kernel must not write W.
bool multiply_few_rows(const Execution&, const LinearWeights&, AnyMatrix x, AnyMatrix y,
                       const std::optional<ActivationAfter>& after);

}  // namespace weft::kernels::cuda
