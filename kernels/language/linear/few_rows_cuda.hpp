// SPDX-License-Identifier: Apache-2.0
//
// Products of few rows on a GPU, as a step of generation has them: few_rows.hpp.
#pragma once

#include <optional>

#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/decode/cached_ahead.hpp"
#include "kernels/language/linear/linear.hpp"

namespace weft::kernels::cuda {

/// True if multiply_few_rows takes these operands: bf16 and at most 64 rows, on GPUs from compute capability 9.0 on.
bool fits_few_rows(const LinearWeights&, AnyMatrix x, AnyMatrix y);

/// What precedes and follows a product. All rows are bf16.
struct FewRowsSteps {
  const JoinedNorm* norm = nullptr;              ///< whose weights are those of the product: of the rows of x
  Array<const Moments> norm_moments = {};        ///< of x
  std::optional<MlpActivation> activation = {};  ///< without gate
  AnyMatrix activated = {};                      ///< [n, outputs], from y as stored
  AnyMatrix residual = {};                       ///< [n, outputs] or without data: y = residual + y, both rounded
  Array<Moments> moments = {};                   ///< of y as stored, [n, moment_groups(outputs)], or empty
  CachedAhead ahead = {};                        ///< requested while the kernel waits
};

/// y = x Wᵀ + b, with b in fp32, of operands that fit. y: or without data, not stored. A row does not depend on the
/// number of rows. Weights, biases and those of the norm are read while the kernel before it in the stream may still
/// run, so that kernel must not write them.
void multiply_few_rows(const Execution&, const LinearWeights& weights, AnyMatrix x, AnyMatrix y, const FewRowsSteps&);

}  // namespace weft::kernels::cuda
